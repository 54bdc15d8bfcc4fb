"""A short run of the fuzzer of study files; ``make fuzz`` has longer ones."""

import os
from pathlib import Path

import warm

TOOLS = Path(__file__).parents[1] / "tools"


def test_mutated_study_gives_plan_or_user_error(tmp_path: Path) -> None:
    words = ["fuzz_studies", "--mutants", "100", "--seed", "0"]
    code = f"import sys; sys.path.insert(0, {str(TOOLS)!r}); sys.argv = {words!r}; import fuzz_studies"
    done = warm.python(f"{code}; sys.exit(fuzz_studies.main())", tmp_path, os.environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "100 mutants of seed 0: 0 findings" in done.stdout and list(tmp_path.iterdir()) == []
