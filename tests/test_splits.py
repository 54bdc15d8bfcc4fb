"""Tests of validation and fractions: stratified, nested, disjoint, and independent of each other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vitlab import noise
from vitlab.data.draws import hold_out_stratified, select_stratified_share
from vitlab.data.prepare import prepare
from vitlab.data.splits import Subset
from vitlab.errors import DataError

COUNTS = st.lists(st.integers(1, 60), min_size=2, max_size=6)


def labels(counts: list[int]) -> torch.Tensor:
    """Return shuffled labels with the given class sizes."""
    y_N = torch.cat([torch.full((n,), label) for label, n in enumerate(counts)])
    return y_N[noise.permutation(noise.key(0, "test"), len(y_N))]


@pytest.mark.slow
@given(COUNTS.filter(lambda counts: max(counts) > 1), st.floats(0.01, 0.99), st.integers(0, 5))
def test_hold_out_is_stratified_partition(counts: list[int], share: float, seed: int) -> None:
    y_N = labels(counts)
    training, held_out = hold_out_stratified(y_N, torch.arange(len(y_N)), share, noise.key(seed, "split"))
    assert sorted([*training.tolist(), *held_out.tolist()]) == list(range(len(y_N)))
    for label, n in enumerate(counts):
        count = int((y_N[held_out] == label).sum())
        if n == 1:
            assert count == 0, "the only image of a class is trained on"
        else:
            assert 1 <= count <= n - 1
            assert abs(count - share * n) <= 1, "as near to the share as whole images allow"


@pytest.mark.slow
@given(COUNTS, st.floats(0.001, 1), st.floats(0.001, 1))
def test_smaller_fraction_is_subset_of_larger(counts: list[int], one: float, other: float) -> None:
    y_N, key = labels(counts), noise.key(1, "subset")
    identity = torch.arange(len(y_N)) * 7 + 3
    small, large = (set(select_stratified_share(y_N, identity, share, key).tolist()) for share in sorted((one, other)))
    assert small <= large
    for label, n in enumerate(counts):
        count = sum(1 for i in small if y_N[i] == label)
        assert count >= 1
        assert count == 1 or abs(count - min(one, other) * n) <= 0.5 + 1e-9


def test_larger_validation_share_includes_smaller() -> None:
    y_N = labels([50, 30, 20])
    small, large = (set(hold_out_stratified(y_N, torch.arange(100), share, 5)[1].tolist()) for share in (0.1, 0.4))
    assert small < large


def test_draw_depends_on_identity_not_on_other_images() -> None:
    y_N = labels([40, 40])
    _, held_out = hold_out_stratified(y_N, torch.arange(80), 0.25, 9)
    alone = (y_N == 1).nonzero()[:, 0]
    _, held_alone = hold_out_stratified(y_N[alone], alone, 0.25, 9)
    assert alone[held_alone].tolist() == [i for i in held_out.tolist() if y_N[i] == 1]


def test_empty_hold_out_is_refused() -> None:
    with pytest.raises(DataError, match="none of the 3 can be held out"):
        hold_out_stratified(torch.arange(3), torch.arange(3), 0.5, 0)


@pytest.mark.slow
def test_every_image_is_held_out_equally_often() -> None:
    y_N = torch.zeros(20, dtype=torch.int64)
    times = torch.zeros(20)
    for seed in range(2000):
        times[hold_out_stratified(y_N, torch.arange(20), 0.25, noise.key(seed, "split"))[1]] += 1
    # 500 each; binomial, sd 19.4
    assert (times - 500).abs().max() < 4.5 * 19.4


# -- as a study gets them ---------------------------------------------------------------------------------------------


def ids(prepared) -> tuple[set[int], set[int]]:
    return set(prepared.train.id_N.tolist()), set(prepared.val.id_N.tolist())


def test_validation_is_equal_for_all_seeds_and_fractions() -> None:
    whole, val = ids(prepare("digits", {"split": 0, "subset": 0}))
    assert not whole & val and len(whole | val) == 1437
    assert len(val) == pytest.approx(0.2 * 1437, abs=5)
    previous = whole
    for share in (0.6, 0.25, 0.05):
        train, same = ids(prepare({"type": "digits", "fraction": share}, {"split": 0, "subset": 0}))
        assert same == val
        assert train < previous
        assert len(train) == pytest.approx(share * len(whole), abs=5)
        previous = train
    other, same = ids(prepare({"type": "digits", "fraction": 0.25}, {"split": 0, "subset": 1}))
    assert same == val, "the stream of fractions leaves validation alone"
    again, _ = ids(prepare({"type": "digits", "fraction": 0.25}, {"split": 0, "subset": 0}))
    overlap = len(other & again) / len(again)
    assert 0.15 < overlap < 0.35, "two draws of a quarter share a quarter"
    _, other_val = ids(prepare("digits", {"split": 1, "subset": 0}))
    assert 0.1 < len(other_val & val) / len(val) < 0.3


def test_configured_share_replaces_default_split() -> None:
    synthetic = {"type": "synthetic", "image_size": 4, "num_classes": 4, "train_images": 400, "test_images": 4}
    assert len(prepare(synthetic, {"split": 0, "subset": 0}).val) == 40
    prepared = prepare({**synthetic, "validation": 0.5, "fraction": 0.5}, {"split": 0, "subset": 0})
    assert (len(prepared.train), len(prepared.val), len(prepared.test)) == (100, 200, 4)
    assert prepared.train.y_N.bincount().tolist() == [25] * 4
    assert prepared.val.y_N.bincount().tolist() == [50] * 4


def test_subsets_of_one_official_split_share_their_copy_on_a_device() -> None:
    x_NCHW = torch.zeros(6, 1, 2, 2, dtype=torch.uint8)
    whole = Subset(x_NCHW, *[torch.arange(6)] * 3)
    train, val = (whole.select(torch.tensor(rows)).to(torch.device("meta")) for rows in ([0, 2, 4], [1, 3]))
    assert train.pixels_MCHW.device.type == "meta" and val.pixels_MCHW is train.pixels_MCHW
    assert train.y_N.tolist() == [0, 2, 4] and train.at(slice(1, 3)).shape == (2, 1, 2, 2)
