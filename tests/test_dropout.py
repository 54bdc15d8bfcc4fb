"""Tests of dropout and drop-path, whose masks are a function of key, sample and module."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from vitlab import noise
from vitlab.components.base import Dropout, DropPath, name_draws


def model() -> nn.Sequential:
    net = nn.Sequential(Dropout(0.3), nn.Identity(), Dropout(0.3), DropPath(0.3))
    name_draws(net)
    return net


def draws(samples: Tensor, dropout: noise.Key = 5, drop_path: noise.Key = 6) -> noise.Draws:
    return noise.Draws(dropout, drop_path, samples, 0)


@pytest.mark.parametrize("layer", [Dropout(0.3), DropPath(0.3)])
@pytest.mark.parametrize("keyed", [True, False])
def test_dropout_share_and_scale(layer: nn.Module, keyed: bool) -> None:
    torch.manual_seed(0)
    wrapped = nn.Sequential(layer)
    name_draws(wrapped)
    x = torch.ones(20_000, 2, 3)
    if keyed:
        with noise.drawing(draws(torch.arange(20_000))):
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
    with noise.drawing(draws(samples)):
        together = net(x)
    order = torch.tensor([4, 0, 5])
    with noise.drawing(draws(samples[order])):
        assert torch.equal(net(x[order]), together[order])
    with noise.drawing(draws(samples[:1])):
        assert torch.equal(net(x[:1]), together[:1])
    with noise.drawing(draws(samples, dropout=8)):
        assert not torch.equal(net(x), together)


def test_dropout_of_stacked_trials_equals_single_trials() -> None:
    net, x, samples = model(), torch.randn(3, 6, 4, 5), torch.arange(18).view(3, 6)
    keys = torch.tensor([11, 12, 13])

    def call(key: Tensor, x: Tensor, samples: Tensor) -> Tensor:
        with noise.drawing(draws(samples, key, key)):
            return net(x)

    stacked = torch.func.vmap(call)(keys, x, samples)
    for member in range(3):
        with noise.drawing(draws(samples[member], int(keys[member]), int(keys[member]))):
            assert torch.equal(net(x[member]), stacked[member])


def test_dropout_keys_follow_module_path() -> None:
    net, other = model(), model()
    places = [module.place for module in net if isinstance(module, Dropout | DropPath)]
    assert len(set(places)) == 3
    assert places == [module.place for module in other if isinstance(module, Dropout | DropPath)]
    with noise.drawing(draws(torch.arange(2))):
        assert not torch.equal(net[0](torch.ones(2, 50)), net[2](torch.ones(2, 50)))


def test_model_without_named_draws_raises() -> None:
    with noise.drawing(draws(torch.arange(2))), pytest.raises(RuntimeError, match="name_draws"):
        Dropout(0.5)(torch.ones(2, 3))
