"""Tests that batches are a pure function of the step, and augmentation a function of the sample."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from vitlab import noise
from vitlab.data import batches
from vitlab.data import prepare as room
from vitlab.data.augment import pixels
from vitlab.data.batches import Normalize
from vitlab.data.prepare import Feed, prepare
from vitlab.registry import slot

SEEDS = {"split": 0, "subset": 0, "order": 3, "augment": 5}
SYNTHETIC = {"type": "synthetic", "image_size": 8, "num_channels": 3, "train_images": 130, "test_images": 23}
EVERYTHING = [
    "flip",
    {"type": "crop", "padding": 2},
    "random_resized_crop",
    {"type": "color_jitter", "hue": 0.2},
    "three_augment",
    "rand_augment",
    {"type": "erasing", "p": 0.7},
]


def feed(augment: list = [], seeds: dict = SEEDS, dtype: torch.dtype = torch.float32, **options) -> Feed:
    return Feed(prepare({**SYNTHETIC, **options}, SEEDS), augment, seeds, "cpu", dtype)


def test_epoch_is_permutation_without_incomplete_batch() -> None:
    one = feed()
    n = one.count()
    assert n == 120 and one.steps_per_epoch(25) == 4
    for epoch in (0, 1):
        batches = [one.batch(4 * epoch + i, 25) for i in range(4)]
        assert {batch.epoch for batch in batches} == {epoch}
        ids = torch.cat([batch.id_B for batch in batches])
        assert len(set(ids.tolist())) == 100
        order = noise.permutation(noise.key(SEEDS["order"], "order", epoch), n)
        expected = prepare(SYNTHETIC, SEEDS).train
        assert torch.equal(ids, expected.id_N[order[:100]])
        assert torch.equal(torch.cat([batch.y_B for batch in batches]), expected.y_N[order[:100]])
    assert not torch.equal(one.batch(0, 25).id_B, one.batch(4, 25).id_B)


def test_batch_larger_than_data_has_all_of_it() -> None:
    one = feed(fraction=0.1)
    assert one.steps_per_epoch(500) == 1
    assert len(one.batch(0, 500).y_B) == one.count() < 500
    assert one.batch(3, 500).epoch == 3


def test_batches_can_be_drawn_in_any_order_and_again() -> None:
    forward = [feed(EVERYTHING).batch(step, 16) for step in range(20)]
    one = feed(EVERYTHING)
    for step in (19, 3, 3, 11, 0):
        for mine, theirs in zip(one.batch(step, 16), forward[step], strict=True):
            assert mine == theirs if isinstance(mine, int) else torch.equal(mine, theirs)


@pytest.mark.parametrize("choice", EVERYTHING, ids=lambda choice: choice if isinstance(choice, str) else choice["type"])
def test_batch_size_does_not_change_augmentation_of_sample(choice) -> None:
    def samples_at(batch_size: int) -> dict[int, torch.Tensor]:
        one, samples = feed([choice, "flip"]), {}
        for step in range(one.steps_per_epoch(batch_size)):
            batch = one.batch(step, batch_size)
            samples.update(zip(batch.id_B.tolist(), batch.x_BCHW, strict=True))
        return samples

    small, large = samples_at(9), samples_at(58)
    common = small.keys() & large.keys()
    assert len(common) > 100
    for identity in common:
        torch.testing.assert_close(small[identity], large[identity], rtol=0, atol=2e-6)
    assert any(not torch.equal(small[i], large[j]) for i in common for j in common if i != j)


def test_epoch_seed_and_list_position_change_draws() -> None:
    one = feed([{"type": "crop", "padding": 4}])
    everything = one.count()

    def by_id(source: Feed, step: int) -> torch.Tensor:
        batch = source.batch(step, everything)
        return batch.x_BCHW[batch.id_B.argsort()]

    first = by_id(one, 0)
    assert torch.equal(first, by_id(one, 0))
    assert not torch.equal(first, by_id(one, 1))
    assert not torch.equal(first, by_id(feed([{"type": "crop", "padding": 4}], {**SEEDS, "augment": 6}), 0))
    assert torch.equal(first, by_id(feed([{"type": "crop", "padding": 4}], {**SEEDS, "order": 9}), 0)), (
        "another order, the same augmentation"
    )
    # two equal flips would cancel
    twice, never = by_id(feed(["flip", "flip"]), 0), by_id(feed(), 0)
    same = (twice == never).flatten(1).all(1).float().mean()
    assert 0.3 < same < 0.7


def test_normalisation_equals_textbook() -> None:
    prepared = prepare(SYNTHETIC, SEEDS)
    one = Feed(prepared, [], SEEDS, "cpu", torch.float64)
    batch = one.batch(0, 32)
    place = {identity: i for i, identity in enumerate(prepared.train.id_N.tolist())}
    pixels = torch.stack([prepared.train.x_NCHW[place[i]] for i in batch.id_B.tolist()]).double() / 255
    mean, std = (torch.tensor(values, dtype=torch.float64)[:, None, None] for values in (prepared.mean, prepared.std))
    torch.testing.assert_close(batch.x_BCHW, (pixels - mean) / std, rtol=1e-12, atol=1e-12)
    everything = torch.cat([part.x_BCHW for split in ("train", "val") for part in one.evaluation(split, 50)])
    assert everything.mean((0, 2, 3)).tolist() == pytest.approx([0] * 3, abs=1e-9), "of the official training split"
    assert everything.std((0, 2, 3), correction=0).tolist() == pytest.approx([1] * 3, abs=1e-9)
    narrow = Normalize(prepared.mean, prepared.std, dtype=torch.bfloat16)(prepared.train.x_NCHW)
    assert narrow.dtype == torch.bfloat16
    wide = Normalize(prepared.mean, prepared.std)(prepared.train.x_NCHW)
    assert torch.equal(narrow, wide.bfloat16())


@pytest.mark.parametrize(
    ("normalize", "mean", "std"),
    [
        ("half", (0.5,) * 3, (0.5,) * 3),
        ("unit", (0.0,) * 3, (1.0,) * 3),
        ("imagenet", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ({"mean": 0.1, "std": [0.2]}, (0.1,) * 3, (0.2,) * 3),
    ],
)
def test_normalisations_by_name(normalize, mean, std) -> None:
    prepared = prepare({**SYNTHETIC, "normalize": normalize}, SEEDS)
    assert (prepared.mean, prepared.std) == (mean, std)


def test_evaluation_batches_have_every_image_once_without_augmentation() -> None:
    prepared = prepare(SYNTHETIC, SEEDS)
    one = Feed(prepared, EVERYTHING, SEEDS)
    for split, subset in (("train", prepared.train), ("val", prepared.val), ("test", prepared.test)):
        batches = list(one.evaluation(split, 10))
        assert one.count(split) == len(subset)
        assert torch.equal(torch.cat([batch.id_B for batch in batches]), subset.id_N)
        assert torch.equal(torch.cat([batch.y_B for batch in batches]), subset.y_N)
        plain = Normalize(prepared.mean, prepared.std)(subset.x_NCHW)
        assert torch.equal(torch.cat([batch.x_BCHW for batch in batches]), plain)


def test_training_does_not_write_to_images() -> None:
    prepared = prepare(SYNTHETIC, SEEDS)
    before = prepared.train.pixels_MCHW.clone()
    one = Feed(prepared, EVERYTHING, SEEDS)
    for step in range(5):
        one.batch(step, 30).x_BCHW.zero_()
    assert torch.equal(prepared.train.pixels_MCHW, before)
    assert prepared.val.pixels_MCHW is prepared.train.pixels_MCHW, "no copy for each trial and split"


def test_augmentations_come_from_resolved_choice() -> None:
    choice = slot("dataset").resolve_choice({**SYNTHETIC, "augment": ["flip", {"type": "crop", "padding": 1}]})
    one = Feed(prepare(choice, SEEDS), choice.options["augment"], SEEDS)
    assert torch.equal(one.batch(2, 16).x_BCHW, feed(["flip", {"type": "crop", "padding": 1}]).batch(2, 16).x_BCHW)


def test_twenty_trials_read_data_once_with_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from vitlab.data.datasets.synthetic import Synthetic

    reads = []
    original = Synthetic.read
    monkeypatch.setattr(Synthetic, "read", lambda self, split: reads.append(split) or original(self, split))
    monkeypatch.setattr(room, "_cache", type(room._cache)())
    for seed in range(20):
        prepare({**SYNTHETIC, "fraction": 0.5, "augment": ["flip"]}, {**SEEDS, "subset": seed})
    assert reads == ["train", "test"]
    for size in range(4, 12):
        prepare({**SYNTHETIC, "size": size}, SEEDS)
    assert len(room._cache) == room.MAX_CACHED
    prepare({**SYNTHETIC, "size": 11, "normalize": "half"}, SEEDS)
    assert len(reads) == 2 + 2 * 8, "what was used last is still here"


def test_prepared_has_correct_facts() -> None:
    prepared = prepare({**SYNTHETIC, "channels": 1}, SEEDS)
    assert prepared.info == room.data_info({**SYNTHETIC, "channels": 1})
    assert dataclasses.is_dataclass(prepared) and prepared.train.x_NCHW.shape[1] == prepared.info.channels == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_on_gpu_equal_cpu() -> None:
    prepared = prepare(SYNTHETIC, SEEDS)
    here, there = (Feed(prepared, EVERYTHING, SEEDS, device) for device in ("cpu", "cuda"))
    for step in range(6):
        one, other = here.batch(step, 32), there.batch(step, 32)
        assert other.x_BCHW.is_cuda
        assert torch.equal(one.id_B, other.id_B.cpu())
        off = ((one.x_BCHW - other.x_BCHW.cpu()).abs() > 1e-4).float().mean()
        assert off < 0.01, "a level apart where rounding decides"


# -- several trials on a GPU ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"normalize": "half"}])
@pytest.mark.parametrize("choice", [*EVERYTHING, "rand_augment_timm"], ids=str)
def test_trials_augmented_together_have_their_own_images(choice, options, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU computes an operation for the images alone that it was drawn for; here it computes it for all, as a GPU."""
    for module in (batches, pixels):
        monkeypatch.setattr(module, "PICKING_DEVICES", ())
    calls: list[int] = []
    kind = slot("augment").find(choice if isinstance(choice, str) else choice["type"])[0]
    own = kind.__call__
    monkeypatch.setattr(kind, "__call__", lambda self, x, key, ids: calls.append(len(x)) or own(self, x, key, ids))

    def feeds() -> list[Feed]:
        return [feed([choice], {**SEEDS, "order": 3 + i, "augment": 5 * i}, **options) for i in range(3)]

    alone, together = feeds(), feeds()
    batches.enable_joint_batches(together)
    for step in (0, 7):
        calls.clear()
        expected = [one.batch(step, 16) for one in alone]
        assert calls == [16] * 3
        calls.clear()
        for one, other in zip(expected, (one.batch(step, 16) for one in together), strict=True):
            torch.testing.assert_close(other.x_BCHW, one.x_BCHW, rtol=0, atol=2e-6)
            assert torch.equal(other.id_B, one.id_B) and torch.equal(other.y_B, one.y_B)
        assert calls == [48]
    assert len({batch.x_BCHW.sum().item() for batch in expected}) == 3


def test_trials_of_other_augmentations_are_augmented_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "PICKING_DEVICES", ())
    some = [feed(["flip"]), feed(["flip", "erasing"])]
    batches.enable_joint_batches(some)
    assert [one._peers for one in some] == [(), ()]


def test_masks_of_trials_are_augmented_together(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (batches, pixels):
        monkeypatch.setattr(module, "PICKING_DEVICES", ())
    scenes = {"type": "digit_scenes", "image_size": 16, "train_images": 40, "test_images": 16}

    def feeds() -> list[Feed]:
        augment = ["flip", "crop", "rand_augment"]
        return [Feed(prepare(scenes, SEEDS), augment, {**SEEDS, "augment": i}, "cpu") for i in range(2)]

    alone, together = feeds(), feeds()
    batches.enable_joint_batches(together)
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one.batch(1, 8).y_B, other.batch(1, 8).y_B)
