"""Tests of keyed draws against the hash in plain Python integers, and against their distributions."""

from __future__ import annotations

import hashlib
import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from vitlab import noise

WORD = 0xFFFFFFFF
GOLDEN = 0x9E3779B9


def lowbias32(x: int) -> int:
    """Apply Chris Wellons' 32-bit finaliser, as published: unsigned arithmetic modulo 2^32."""
    x ^= x >> 16
    x = x * 0x7FEB352D & WORD
    x ^= x >> 15
    x = x * 0x846CA68B & WORD
    return x ^ x >> 16


def bits(key: int, sample: int, draw: int) -> int:
    """Compute the bits as documented in :mod:`vitlab.noise`, in unsigned words."""
    low, high = key & WORD, key >> 32 & WORD
    row = lowbias32(sample & WORD ^ low)
    row = lowbias32(row ^ sample >> 32 & WORD ^ high)
    return lowbias32(lowbias32(row + draw * GOLDEN & WORD) ^ row)


def fold(key: int, number: int) -> int:
    low = lowbias32((key & WORD) + number * GOLDEN & WORD)
    high = lowbias32(key >> 32 & WORD ^ low)
    (signed,) = struct.unpack("<q", struct.pack("<II", low, high))
    return int(signed)


KEYS = st.integers(-(2**63), 2**63 - 1)
SAMPLES = st.lists(st.integers(0, 2**40), min_size=1, max_size=5)


@given(key=KEYS, samples=SAMPLES, n=st.integers(0, 40))
def test_bits_equal_documented_hash(key: int, samples: list[int], n: int) -> None:
    draws = noise.bits(key, torch.tensor(samples), n)
    assert draws.dtype == torch.int32 and draws.shape == (len(samples), n)
    assert [[word & WORD for word in row] for row in draws.tolist()] == [
        [bits(key, sample, draw) for draw in range(n)] for sample in samples
    ]


@given(key=KEYS, number=st.integers(0, 2**31 - 1))
def test_fold_is_equal_on_host_and_device(key: int, number: int) -> None:
    assert noise.fold(key, number) == fold(key, number)
    folded = noise.fold(torch.tensor(key), number)
    assert isinstance(folded, torch.Tensor) and int(folded) == fold(key, number)


@given(key=KEYS, samples=SAMPLES, below=st.integers(1, 2**31))
def test_uniform_integers_and_normal_are_derived_from_bits(key: int, samples: list[int], below: int) -> None:
    words = [[bits(key, sample, draw) for draw in range(6)] for sample in samples]
    sample_B = torch.tensor(samples)
    assert noise.uniform(key, sample_B, 6).tolist() == [[(word >> 8) / 2**24 for word in row] for row in words]
    assert noise.integers(key, sample_B, 6, below).tolist() == [[word * below >> 32 for word in row] for row in words]
    unit = np.array([[(word >> 8) / 2**24 for word in row] for row in words])
    radius, angle = np.sqrt(-2 * np.log1p(-unit[:, :3])), 2 * np.pi * unit[:, 3:]
    expected = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], 1)
    np.testing.assert_allclose(noise.normal(key, sample_B, 6).numpy(), expected, rtol=0, atol=5e-6)
    np.testing.assert_allclose(noise.normal(key, sample_B, 5).numpy(), expected[:, :5], rtol=0, atol=5e-6)


def test_keys_equal_published_hash_and_are_stable() -> None:
    """Stored results depend on these keys: a changed key would change every number of every study."""
    digest = hashlib.blake2b(b"3\x1faugment\x1f7", digest_size=8).digest()
    assert noise.key(3, "augment", 7) == struct.unpack("<q", digest)[0]
    assert noise.key(3, "augment", 7) == noise.key(3, "augment", 7)
    keys = {noise.key(seed, stream, at) for seed in range(50) for stream in ("order", "augment") for at in range(50)}
    assert len(keys) == 5000
    assert noise.key(1, 23) != noise.key(12, 3), "coordinates do not run into each other"


# -- distributions ----------------------------------------------------------------------------------------------------

MANY = 100_000


@pytest.mark.parametrize(("rows", "n"), [(MANY, 1), (1, MANY), (250, 400)], ids=["samples", "draws", "both"])
def test_uniform_draws_are_uniform_and_uncorrelated(rows: int, n: int) -> None:
    draws = noise.uniform(noise.key(0, "test", n), torch.arange(rows), n).double().flatten().numpy()
    assert draws.min() >= 0 and draws.max() < 1
    assert stats.kstest(draws, "uniform").pvalue > 1e-3
    # Neighbours fill the square evenly, and so do draws further apart.
    for lag in (1, 2, 7, 64):
        counts, _, _ = np.histogram2d(draws[:-lag], draws[lag:], bins=10, range=[[0, 1], [0, 1]])
        assert stats.chisquare(counts.flatten()).pvalue > 1e-4, lag


def test_neighbouring_keys_are_uncorrelated() -> None:
    sample_B = torch.arange(MANY // 10)
    one = noise.uniform(noise.key(0, "dropout", 0), sample_B, 1).flatten()
    others = [noise.key(1, "dropout", 0), noise.key(0, "drop_path", 0), noise.key(0, "dropout", 1)]
    others += [noise.fold(noise.key(0, "dropout", 0), layer) for layer in range(3)]
    for other in others:
        correlation = stats.pearsonr(one, noise.uniform(other, sample_B, 1).flatten())
        assert correlation.pvalue > 1e-4, other


def test_bits_are_balanced_and_avalanche() -> None:
    key = noise.key(0, "bits")
    sample_B = torch.arange(20_000)
    place = torch.arange(32)
    draws = noise.bits(key, sample_B, 1)
    share = ((draws.long() >> place) & 1).double().mean(0)
    # Five standard errors of a share of one half.
    bound = 5 * 0.5 / math.sqrt(len(sample_B))
    assert (share - 0.5).abs().max() < bound
    for bit in range(40):
        other = noise.bits(key, sample_B ^ (1 << bit), 1)
        flipped = (((draws ^ other).long() >> place) & 1).double().mean(0)
        assert (flipped - 0.5).abs().max() < 2 * bound, bit


def test_integers_are_uniform_and_below_bound() -> None:
    for below in (1, 2, 3, 10, 1000):
        draws = noise.integers(noise.key(0, "integers", below), torch.arange(MANY), 1, below).flatten().numpy()
        counts = np.bincount(draws, minlength=below)
        assert len(counts) == below
        assert below == 1 or stats.chisquare(counts).pvalue > 1e-3


def test_normal_draws_are_normal() -> None:
    draws = noise.normal(noise.key(0, "normal"), torch.arange(MANY // 100), 100).double().flatten().numpy()
    assert np.isfinite(draws).all() and stats.kstest(draws, "norm").pvalue > 1e-3
    error = 1 / math.sqrt(MANY)
    assert abs(draws.mean()) < 4 * error
    assert abs(draws.var() - 1) < 4 * math.sqrt(2) * error
    assert abs(stats.skew(draws)) < 4 * math.sqrt(6) * error
    assert abs(stats.kurtosis(draws)) < 4 * math.sqrt(24) * error
    # The two halves of a pair share a radius and an angle; the values must not show it.
    pairs = noise.normal(noise.key(1, "normal"), torch.arange(MANY // 10), 2).double().numpy()
    assert stats.pearsonr(pairs[:, 0], pairs[:, 1]).pvalue > 1e-3
    assert stats.pearsonr(pairs[:, 0] ** 2, pairs[:, 1] ** 2).pvalue > 1e-3


# -- one draw, wherever it is made ------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(data=st.data(), n=st.integers(1, 12))
def test_draws_of_sample_do_not_depend_on_batch_or_order(data: st.DataObject, n: int) -> None:
    samples = data.draw(st.lists(st.integers(0, 2**40), min_size=2, max_size=12, unique=True))
    order = data.draw(st.permutations(range(len(samples))))
    cut = data.draw(st.integers(1, len(samples) - 1))
    key, sample_B = noise.key(0, "batch"), torch.tensor(samples)
    for draw in (noise.bits, noise.uniform):
        whole = draw(key, sample_B, n)
        torch.testing.assert_close(draw(key, sample_B[list(order)], n), whole[list(order)], rtol=0, atol=0)
        parts = torch.cat([draw(key, sample_B[:cut], n), draw(key, sample_B[cut:], n)])
        torch.testing.assert_close(parts, whole, rtol=0, atol=0)
        # Additional draws do not change earlier ones.
        torch.testing.assert_close(draw(key, sample_B, n + 3)[:, :n], whole, rtol=0, atol=0)


def test_draws_under_vmap_equal_single_trials() -> None:
    keys = [noise.key(seed, "dropout", 4) for seed in range(5)]
    sample_B = torch.tensor([3, 17, 2**33, 0])
    stacked = torch.tensor(keys)
    for draw in (noise.bits, noise.uniform, noise.normal):
        together = torch.func.vmap(lambda key, draw=draw: draw(noise.fold(key, 9), sample_B, 7))(stacked)
        alone = torch.stack([draw(noise.fold(key, 9), sample_B, 7) for key in keys])
        torch.testing.assert_close(together, alone, rtol=0, atol=0)
    together = torch.func.vmap(lambda key: noise.integers(key, sample_B, 7, 10))(stacked)
    torch.testing.assert_close(together, torch.stack([noise.integers(key, sample_B, 7, 10) for key in keys]))


def test_draws_leave_torch_generator_unchanged() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    noise.normal(noise.key(0, "x"), torch.arange(8), 3)
    noise.permutation(noise.key(0, "x"), 8)
    assert torch.equal(torch.get_rng_state(), before)


# -- permutations -----------------------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(key=KEYS, n=st.integers(0, 500))
def test_permutation_sorts_bits_of_positions(key: int, n: int) -> None:
    words = [(bits(key, i, 0) & 0x7FFFFFFF) << 31 | bits(key, i, 1) & 0x7FFFFFFF for i in range(n)]
    order = noise.permutation(key, n)
    assert order.tolist() == sorted(range(n), key=words.__getitem__)
    assert sorted(order.tolist()) == list(range(n))


@pytest.mark.slow
def test_permutations_are_uniform() -> None:
    """All 24 orders of four, and each of ten items in each of ten positions, are equally frequent."""
    four = [tuple(noise.permutation(noise.key(seed, "order"), 4).tolist()) for seed in range(3000)]
    counts = np.unique(np.array(four), axis=0, return_counts=True)[1]
    assert len(counts) == 24 and stats.chisquare(counts).pvalue > 1e-3
    ten = torch.stack([noise.permutation(noise.key(seed, "order", 1), 10) for seed in range(2000)])
    for place in range(10):
        assert stats.chisquare(torch.bincount(ten[:, place], minlength=10).numpy()).pvalue > 1e-4


# -- draws inside a model ---------------------------------------------------------------------------------------------


def test_draw_keys_are_restored_after_step() -> None:
    outer = noise.Draws(1, 2, torch.arange(3), 3)
    inner = noise.Draws(3, 4, torch.arange(3), 5)
    assert noise.current() is None
    with noise.use_model_draws(outer):
        with pytest.raises(RuntimeError, match="in a layer"), noise.use_model_draws(inner):
            assert noise.current() is inner
            raise RuntimeError("in a layer")
        assert noise.current() is outer
    assert noise.current() is None
