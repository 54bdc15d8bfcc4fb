"""A short run of each fuzzer, of study files, of what commands are given and of stores; ``make fuzz`` has longer ones."""

import os
from pathlib import Path

import pytest
import warm

TOOLS = Path(__file__).parents[1] / "tools"

# One process for all, and the studies are not planned before, as is done for the time limits of single inputs.
RUNS = f"""
import sys
sys.path.insert(0, {str(TOOLS)!r})
from functools import partial
import fuzz_inputs, fuzz_store, fuzz_studies
from fuzzing import main
fuzz_studies.PIPELINES = []
for bench, inputs, seed in (
    (fuzz_studies.prepared, 12, "0"),
    (fuzz_studies.prepared, 6, "every"),
    (partial(fuzz_inputs.bench, fuzz_inputs.KINDS), 5, "0"),
    (fuzz_store.bench, 3, "0"),
):
    sys.argv = ["fuzz", "--inputs", str(inputs), "--seed", seed]
    main(bench, None)
"""


@pytest.mark.slow
def test_wild_input_is_answered_or_refused_with_sentence(tmp_path: Path) -> None:
    done = warm.python(RUNS, tmp_path, os.environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("0 findings") == 4 and list(tmp_path.iterdir()) == [], done.stdout
