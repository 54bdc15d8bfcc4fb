"""Tests with some damaged stores; ``make fuzz`` has more."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_damaged_store_is_read_without_traceback_and_completed(tmp_path: Path) -> None:
    command = [sys.executable, str(HERE / "fuzz_store.py"), "--mutants", "20", "--seed", "0"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "20 mutants of seed 0: 0 findings" in done.stdout and list(tmp_path.iterdir()) == []
