"""Tests of micro-batches: gradient, loss and draws equal those of the full batch."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from vitlab.data.pixels import IGNORED
from vitlab.data.prepare import Feed, prepare
from vitlab.engines.base import train
from vitlab.engines.vmap import Vmap
from vitlab.errors import UserError
from vitlab.registry import slot
from vitlab.spec import STREAMS, TrainSpec
from vitlab.training.distributed import SingleProcess
from vitlab.training.loop import Training
from vitlab.training.memory import MicroBatches

DATA = {"type": "synthetic", "image_size": 8, "train_images": 90, "test_images": 30, "num_classes": 6}
SCENES = {"type": "digit_scenes", "image_size": 8, "digit_size": [5, 7], "train_images": 60, "test_images": 20}
MODEL = {"type": "vit", "patch_size": 4, "dim": 8, "depth": 2, "heads": 2, "drop": 0.1, "drop_path": 0.3}
TRAIN = {"steps": 6, "batch_size": 16, "precision": "fp64", "optimizer": {"type": "sgd", "lr": 0.1}}
TWO = {"prefix": ["class", "distillation"], "head": "distilled"}


class Second(SingleProcess):
    """The second of three processes, without communication."""

    count, rank = 3, 1


def training(
    parts: MicroBatches | None, seed: int = 0, *, data: dict[str, Any] = DATA, model: dict[str, Any] = {}, **train: Any
) -> Training:
    seeds = dict.fromkeys(STREAMS, seed)
    choice = slot("dataset").resolve_choice(data)
    prepared = prepare(choice, seeds)
    built = slot("model").build({**MODEL, **model}, prepared.info)
    built.initialise(seed)
    spec = TrainSpec.model_validate({**TRAIN, **train})
    feed = Feed(prepared, choice.options["augment"], seeds, dtype=torch.float64)
    return Training(built.double(), feed, spec, seeds, None, parts)


def gradients(one: Training) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in one.model.named_parameters() if p.grad is not None}


AUGMENTED = {**DATA, "augment": [{"type": "crop", "padding": 2}, "flip"]}
VOID = {**SCENES, "augment": [{"type": "crop", "padding": 3}]}  # padding of the crop has no label


@pytest.mark.parametrize(
    ("data", "model", "train"),
    [
        (AUGMENTED, {}, {"clip_grad": 0.1, "loss": {"type": "cross_entropy", "label_smoothing": 0.1}}),
        (AUGMENTED, {}, {"mix": {"mixup": 0.8, "cutmix": 1.0}, "loss": "bce", "ema": {"decay": 0.9}}),
        (AUGMENTED, TWO, {"repeats": 3}),
        (VOID, {"prefix": [], "head": "segmentation"}, {}),
        (DATA, {}, {"batch_size": 1000}),
    ],
    ids=["plain", "mixed", "repeated", "pixels", "all-there-is"],
)
@pytest.mark.parametrize("size", [5, 16])
def test_micro_batches_combine_to_full_batch(
    size: int, data: dict[str, Any], model: dict[str, Any], train: dict[str, Any]
) -> None:
    whole, cut = (
        training(parts, data=data, model=model, **train) for parts in (None, MicroBatches(size, SingleProcess()))
    )
    count = whole.images_per_batch
    assert [len(rows) for rows in cut.micro_batches.rows(count)][:-1] == [size] * ((count - 1) // size)
    for step in range(6):
        whole.train_step()
        cut.train_step()
        if step == 0:
            expected, actual = gradients(whole), gradients(cut)
            assert expected.keys() == actual.keys() and max(float(g.abs().max()) for g in expected.values()) > 1e-4
            for name in expected:
                torch.testing.assert_close(actual[name], expected[name], rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.stack(cut.losses["loss"]), torch.stack(whole.losses["loss"]), rtol=0, atol=1e-12)
    for name, value in whole.model.state_dict().items():
        torch.testing.assert_close(cut.model.state_dict()[name], value, rtol=0, atol=1e-12)
    assert cut.evaluate("val").metrics == pytest.approx(whole.evaluate("val").metrics, rel=1e-9)


def without_labels(one: Training, unlabelled: range, rows: range) -> Any:
    batch, draws = Training.draw_batch(one, rows)
    batch.y_B[[place - rows.start for place in unlabelled if place in rows]] = IGNORED
    return batch, draws


def test_micro_batch_without_labels_counts_nothing() -> None:
    """The pixels of some micro-batches have no label, and finally those of all."""
    whole, cut = (
        training(parts, data=SCENES, model={"prefix": [], "head": "segmentation"})
        for parts in (None, MicroBatches(4, SingleProcess()))
    )
    for unlabelled in (range(4, 10), range(16)):
        for one in (whole, cut):
            one.draw_batch = partial(without_labels, one, unlabelled)  # type: ignore[method-assign]
            one.train_step()
        for name, gradient in gradients(whole).items():
            torch.testing.assert_close(gradients(cut)[name], gradient, rtol=0, atol=1e-12)
    assert all(not gradient.any() for gradient in gradients(cut).values())
    assert [float(loss) for loss in cut.losses["loss"]] == pytest.approx([float(x) for x in whole.losses["loss"]])


@pytest.mark.slow
def test_rows_of_all_processes_form_the_batch() -> None:
    for count in (3, 16, 17, 128):
        rows: list[int] = []
        for rank in range(3):
            peers = Second()
            peers.rank = rank
            rows += [row for part in MicroBatches(4, peers).rows(count) for row in part]
        assert rows == list(range(count))
    with pytest.raises(UserError, match="batches of 2 images cannot be divided among 3 processes"):
        training(MicroBatches(None, Second()), batch_size=2)


@pytest.mark.parametrize("rows", [range(16), range(0, 5), range(5, 10), range(9, 16)], ids=str)
def test_micro_batch_draws_equal_full_batch(rows: range) -> None:
    """Partners of mixed images may be in another micro-batch."""
    one = training(None, data=AUGMENTED, mix={"mixup": 0.8, "cutmix": 1.0}, repeats=2)
    for step in range(4):
        one.step = step
        (whole, of_all), (part, of_part) = one.draw_batch(range(16)), one.draw_batch(rows)
        assert torch.equal(part.x_BCHW, whole.x_BCHW[rows.start : rows.stop])
        assert torch.equal(part.y_B, whole.y_B[rows.start : rows.stop])
        assert torch.equal(of_part.sample_B, of_all.sample_B[rows.start : rows.stop])
        assert (of_part.dropout, of_part.drop_path) == (of_all.dropout, of_all.drop_path)


def test_batch_dependent_modules_are_not_split() -> None:
    training(MicroBatches(4, SingleProcess()), model={"patch": {"type": "conv_stem", "norm": "groupnorm"}})
    training(None, model={"patch": {"type": "conv_stem", "norm": "batchnorm"}})
    with pytest.raises(UserError, match=r"^patch_embed\.convs\.0\.norm normalises by the statistics of a whole batch"):
        training(MicroBatches(4, SingleProcess()), model={"patch": {"type": "conv_stem", "norm": "batchnorm"}})


@pytest.mark.slow
def test_stacked_trials_use_micro_batches() -> None:
    how: dict[str, Any] = {"data": AUGMENTED, "clip_grad": 0.5, "mix": {"mixup": 0.8}}
    whole, cut = (
        [training(parts, seed, **how) for seed in range(2)] for parts in (None, MicroBatches(5, SingleProcess()))
    )
    first, second = Vmap(whole), Vmap(cut)
    for _ in range(6):
        first.train_step()
        second.train_step()
    for one, other in zip(whole, cut, strict=True):
        for name, value in one.model.state_dict().items():
            torch.testing.assert_close(other.model.state_dict()[name], value, rtol=0, atol=1e-12)
        torch.testing.assert_close(
            torch.stack(other.losses["loss"]), torch.stack(one.losses["loss"]), rtol=0, atol=1e-12
        )
    alone = training(MicroBatches(5, SingleProcess()), 1, **how)
    train([alone], Vmap)
    assert all(torch.equal(value, cut[1].model.state_dict()[name]) for name, value in alone.model.state_dict().items())


def test_batch_is_not_split_by_default() -> None:
    assert MicroBatches(None, SingleProcess()).whole
    assert not MicroBatches(64, SingleProcess()).whole and not MicroBatches(None, Second()).whole
