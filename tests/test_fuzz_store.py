"""Tests with some damaged stores; ``make fuzz`` has more."""

import os
from pathlib import Path

import warm

TOOLS = Path(__file__).parents[1] / "tools"


def test_damaged_store_is_read_without_traceback_and_completed(tmp_path: Path) -> None:
    words = ["fuzz_store", "--inputs", "20", "--seed", "0"]
    code = f"import sys; sys.path.insert(0, {str(TOOLS)!r}); sys.argv = {words!r}; import fuzz_store"
    done = warm.python(f"{code}; sys.exit(fuzz_store.main(fuzz_store.bench, None))", tmp_path, os.environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "20 inputs of seed 0: 0 findings" in done.stdout and list(tmp_path.iterdir()) == []
