"""The batch innermost: each piece against torch's own, gradients against finite differences, and what is not known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.components import patch
from vitlab.components.attention import attention
from vitlab.geometry import DataInfo
from vitlab.models import innermost
from vitlab.slots import slot
from vitlab.testing.engines import check_engines
from vitlab.training.cohort import why_not_stack

INFO = DataInfo(image=(8, 8), channels=1, classes=3)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def test_attention_is_that_of_torch() -> None:
    """Queries, keys and values (K, 3, H, E, T, B)."""
    qkv = drawn(2, 3, 2, 3, 5, 4)
    q, k, v = qkv.permute(1, 0, 5, 2, 4, 3)  # (3, K, B, H, T, E)
    wanted = F.scaled_dot_product_attention(q, k, v).permute(0, 2, 4, 3, 1)
    found = innermost._Attend.apply(qkv, 3**-0.5)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    weight = drawn(*found.shape, seed=1)
    mine, theirs = (torch.autograd.grad((out * weight).sum(), qkv)[0] for out in (found, wanted))
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(innermost._Attend.apply, (drawn(1, 3, 1, 2, 3, 2), 0.7))


def test_layer_norm_is_that_of_torch() -> None:
    x_KDM, weight_KD, bias_KD = drawn(2, 5, 6), drawn(2, 5, seed=1), drawn(2, 5, seed=2)
    found = innermost._Normalise.apply(x_KDM, weight_KD, bias_KD, 1e-3)
    for member in range(2):
        wanted = F.layer_norm(x_KDM[member].T, (5,), weight_KD[member], bias_KD[member], 1e-3).T
        torch.testing.assert_close(found[member], wanted, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(innermost._Normalise.apply, (x_KDM, weight_KD, bias_KD, 1e-3))


def test_patches_are_those_of_a_convolution() -> None:
    x_KBCHW, weight = drawn(2, 3, 2, 8, 6), drawn(5, 2, 4, 3, seed=1)
    found = patch.cut(x_KBCHW, (4, 3)) @ weight.flatten(1).T
    wanted = F.conv2d(x_KBCHW.flatten(0, 1), weight, stride=(4, 3)).flatten(2).transpose(1, 2)
    torch.testing.assert_close(found.flatten(0, 1), wanted, rtol=1e-12, atol=1e-12)


def built(**options: Any) -> Any:
    choice = {"type": "vit", "patch_size": 4, "dim": 8, "depth": 2, "heads": 2, **options}
    return slot("model").build(choice, INFO)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"attention": {"type": "auto", "drop": 0.1}}, "blocks.0.attn drops weights"),
        ({"attention": {"type": "split", "qk_norm": "layernorm"}}, "blocks.0.attn normalises queries and keys"),
        ({"blocks": {"1": {"attention": "linear"}}}, "blocks.1.attn is a Linear"),
        ({"position": "rope2d"}, "rotates queries and keys"),
        ({"position": "relative_bias"}, "has a bias"),
    ],
)
def test_what_is_not_known_is_said(options: dict[str, Any], sentence: str) -> None:
    reason = built(**options).why_not_innermost()
    assert reason is not None and sentence in reason


def test_a_class_of_somebody_else_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be it derived from one that is: it may do another thing."""
    assert built().why_not_innermost() is None

    class Mine(attention.get("fused")):  # type: ignore[misc]
        pass

    model = built()
    model.blocks[1].attn.__class__ = Mine
    assert "blocks.1.attn is a Mine" in (model.why_not_innermost() or "")
    assert "a ResNet8 is not known" in (slot("model").build({"type": "resnet8"}, INFO).why_not_innermost() or "")


def test_it_is_for_processors_and_full_precision() -> None:
    model, cpu = built(), torch.device("cpu")
    assert [why_not_stack(model, precision, cpu) for precision in ("fp32", "fp64")] == [None, None]
    assert "precision bf16" in (why_not_stack(model, "bf16", cpu) or "")
    assert "this is cuda" in (why_not_stack(model, "fp32", torch.device("cuda")) or "")


def test_the_contract_of_parts_sees_a_fault_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """In what is told here, and in a part that computes another thing where its memory lies otherwise."""
    fused, rms = slot("attention").resolve("fused"), slot("norm").resolve("rmsnorm")
    check_engines("fused", fused)
    check_engines("rmsnorm", rms)
    with monkeypatch.context() as patched:
        products = innermost._over_channels
        patched.setattr(innermost, "_over_channels", lambda a, b: products(0.5 * a, b))
        with pytest.raises(AssertionError, match="fused: in a ViT, with the batch innermost, its view '' differs"):
            check_engines("fused", fused)
    plain = rms.component.forward  # type: ignore[attr-defined]
    monkeypatch.setattr(rms.component, "forward", lambda self, x: plain(self, x) * (1 if x.is_contiguous() else 1.001))
    with pytest.raises(AssertionError, match="rmsnorm: in a ViT, with the batch innermost"):
        check_engines("rmsnorm", rms)
