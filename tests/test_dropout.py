"""Tests of dropout and drop-path, whose masks are a function of key, sample and module."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from vitlab import noise
from vitlab.components.base import Dropout, DropPath, draw_path_scales, number_drop_paths, set_dropout_ids


def model() -> nn.Sequential:
    net = nn.Sequential(Dropout(0.3), nn.Identity(), Dropout(0.3), DropPath(0.3))
    set_dropout_ids(net)
    return net


def draws(samples: Tensor, dropout: noise.Key = 5, drop_path: noise.Key = 6) -> noise.Draws:
    return noise.Draws(dropout, drop_path, samples, 0)


@pytest.mark.parametrize("layer", [Dropout(0.3), DropPath(0.3)])
@pytest.mark.parametrize("keyed", [True, False])
def test_dropout_share_and_scale(layer: nn.Module, keyed: bool) -> None:
    torch.manual_seed(0)
    wrapped = nn.Sequential(layer)
    set_dropout_ids(wrapped)
    x = torch.ones(20_000, 2, 3)
    if keyed:
        with noise.use_model_draws(draws(torch.arange(20_000))):
            y = wrapped(x)
    else:
        y = wrapped(x)
    values = y.unique()
    torch.testing.assert_close(values, torch.tensor([0.0, 1 / 0.7]))
    assert (y == 0).float().mean() == pytest.approx(0.3, abs=0.015)
    whole = (y == 0).flatten(1).float().mean(1)
    assert bool(((whole == 0) | (whole == 1)).all()) == isinstance(layer, DropPath)
    assert torch.equal(wrapped.eval()(x), x)
    wrapped.train()


def test_dropout_of_sample_does_not_depend_on_batch() -> None:
    net, x, samples = model(), torch.randn(6, 4, 5), torch.tensor([3, 900, 17, 4, 5, 2**40])
    with noise.use_model_draws(draws(samples)):
        together = net(x)
    order = torch.tensor([4, 0, 5])
    with noise.use_model_draws(draws(samples[order])):
        assert torch.equal(net(x[order]), together[order])
    with noise.use_model_draws(draws(samples[:1])):
        assert torch.equal(net(x[:1]), together[:1])
    with noise.use_model_draws(draws(samples, dropout=8)):
        assert not torch.equal(net(x), together)


def test_dropout_of_stacked_trials_equals_single_trials() -> None:
    net, x, samples = model(), torch.randn(3, 6, 4, 5), torch.arange(18).view(3, 6)
    keys = torch.tensor([11, 12, 13])

    def call(key: Tensor, x: Tensor, samples: Tensor) -> Tensor:
        with noise.use_model_draws(draws(samples, key, key)):
            return net(x)

    stacked = torch.func.vmap(call)(keys, x, samples)
    for member in range(3):
        with noise.use_model_draws(draws(samples[member], int(keys[member]), int(keys[member]))):
            assert torch.equal(net(x[member]), stacked[member])


def test_dropout_keys_follow_module_path() -> None:
    net, other = model(), model()
    places = [module.place for module in net if isinstance(module, Dropout | DropPath)]
    assert len(set(places)) == 3
    assert places == [module.place for module in other if isinstance(module, Dropout | DropPath)]
    with noise.use_model_draws(draws(torch.arange(2))):
        assert not torch.equal(net[0](torch.ones(2, 50)), net[2](torch.ones(2, 50)))


def test_model_without_named_draws_raises() -> None:
    with noise.use_model_draws(draws(torch.arange(2))), pytest.raises(RuntimeError, match="set_dropout_ids"):
        Dropout(0.5)(torch.ones(2, 3))


# -- draws of a step at once ------------------------------------------------------------------------------------------


def lowbias32(x: np.ndarray) -> np.ndarray:
    """Apply the published finaliser to unsigned words of 64 bits, modulo 2^32."""
    x ^= x >> 16
    x = x * 0x7FEB352D & 0xFFFFFFFF
    x ^= x >> 15
    x = x * 0x846CA68B & 0xFFFFFFFF
    return x ^ x >> 16


def uniform(key: int, place: int, sample_B: np.ndarray) -> np.ndarray:
    """Compute the draw of a layer for each sample as documented in :mod:`vitlab.noise`, in unsigned words."""
    low, high = (np.array([key >> shift & 0xFFFFFFFF], np.uint64) for shift in (0, 32))
    low = lowbias32(low + np.uint64(place * 0x9E3779B9 & 0xFFFFFFFF) & np.uint64(0xFFFFFFFF))
    high = lowbias32(high ^ low)
    row_B = lowbias32(sample_B & np.uint64(0xFFFFFFFF) ^ low)
    row_B = lowbias32(row_B ^ sample_B >> np.uint64(32) ^ high)
    return (lowbias32(lowbias32(row_B.copy()) ^ row_B) >> np.uint64(8)) / 2**24


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_paths_drawn_together_are_those_of_each_layer(dtype: torch.dtype) -> None:
    shares = [0.0, 0.1, 0.3, 2 * 0.1 / 11, 0.7, 1 / 3]
    net = nn.Sequential(*[nn.Sequential(DropPath(p)) for p in shares])
    set_dropout_ids(net)
    samples, key = torch.tensor([3, 900, 17, 4, 5, 2**40 + 3, 7, 8]), -12345678901234567
    layers = number_drop_paths(net)
    assert [layer.p for layer in layers] == shares[1:]
    like = torch.zeros(0, dtype=dtype if dtype == torch.float64 else torch.float32)
    others, scales_LB = draw_path_scales(layers, [7, key], [samples.flip(0), samples], like)
    assert not torch.equal(others, scales_LB.flip(1))
    for row, layer in enumerate(layers):
        assert layer.place is not None and layer.row == row
        draw_B = uniform(key, layer.place, samples.numpy().astype(np.uint64))
        kept_B = draw_B.astype(np.float32) >= np.float32(layer.p)
        assert (scales_LB[row] != 0).tolist() == kept_B.tolist()
        x = torch.randn(8, 3, 4).to(dtype)
        with noise.use_model_draws(draws(samples, drop_path=key)):
            alone = layer(x)
        with noise.use_model_draws(draws(samples, drop_path=key)._replace(scale_LB=scales_LB)):
            together = layer(x)
        assert torch.equal(together, alone) and together.dtype == dtype
        torch.testing.assert_close(together[kept_B], x[kept_B] / (1 - layer.p))
