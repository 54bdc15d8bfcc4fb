"""Short runs of the fuzzers; longer ones are commands, such as ``python tests/fuzz_studies.py``."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_mutated_study_gives_plan_or_user_error(tmp_path: Path) -> None:
    command = [sys.executable, str(HERE / "fuzz_studies.py"), "--mutants", "500", "--seed", "0"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "500 mutants of seed 0" in done.stdout and list(tmp_path.iterdir()) == []
