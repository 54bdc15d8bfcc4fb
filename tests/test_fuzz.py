"""Short runs of the fuzzers of study files and of what commands are given; ``make fuzz`` has longer ones."""

import os
from pathlib import Path

import pytest
import warm

TOOLS = Path(__file__).parents[1] / "tools"


@pytest.mark.parametrize(
    "words",
    [
        ["fuzz_studies", "--inputs", "24"],
        ["fuzz_studies", "--inputs", "12", "--seed", "every"],
        ["fuzz_inputs", "--inputs", "24"],
    ],
    ids=" ".join,
)
def test_wild_input_is_answered_or_refused_with_sentence(words: list[str], tmp_path: Path) -> None:
    code = f"import runpy, sys; sys.path.insert(0, {str(TOOLS)!r}); sys.argv = {words!r}"
    code = f"{code}; runpy.run_module({words[0]!r}, run_name='__main__')"
    done = warm.python(code, tmp_path, os.environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 findings" in done.stdout and list(tmp_path.iterdir()) == []
