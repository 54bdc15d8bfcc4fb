"""Tests that need the GPU of a Mac: draws and trainings equal those of the CPU.  They have not run yet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vitlab
from vitlab import noise

pytestmark = pytest.mark.skipif(not torch.backends.mps.is_available(), reason="NOT RUN: no GPU of Apple")


def test_draws_equal_those_of_the_cpu() -> None:
    sample_B = torch.arange(1000) << 20
    for k in (noise.key(3, "augment", 1), noise.tensor_of([noise.key(5, "dropout")], torch.device("cpu"))[0]):
        on_gpu = k.to("mps") if isinstance(k, torch.Tensor) else k
        assert torch.equal(noise.bits(on_gpu, sample_B.to("mps"), 7).cpu(), noise.bits(k, sample_B, 7))


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_training_equals_that_of_the_cpu(engine: str, tmp_path: Path) -> None:
    """Losses and accuracies after few steps differ by the rounding of float32 alone."""
    frames = {}
    for device in ("cpu", "mps"):
        study: dict[str, Any] = {
            "study": "parity",
            "base": {
                "data": {"type": "digits", "augment": ["crop"]},
                "model": {
                    "type": "vit",
                    "patch_size": 2,
                    "dim": 32,
                    "depth": 2,
                    "heads": 4,
                    "drop": 0.1,
                    "drop_path": 0.1,
                },
                "train": {"steps": 20, "batch_size": 32, "evaluations": 2, "optimizer": {"type": "adamw", "lr": 1e-3}},
            },
            "design": {"one_at_a_time": {"model.position": ["rope2d", "relative_bias"]}},
            "seeds": 2,
            "run": {"device": device, "engine": engine, "executor": "inline", "tracker": "none"},
        }
        frames[device] = vitlab.run(study, out=tmp_path / device).results()
    assert set(frames["mps"]["device"]) == {"mps"}
    for name in ("val/loss", "test/loss"):
        np.testing.assert_allclose(frames["mps"][name], frames["cpu"][name], rtol=1e-3)
