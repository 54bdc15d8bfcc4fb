"""Engine batch_last: each piece against torch's own, gradients against finite differences, and what is not known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import stack_module_state

from vitlab import noise
from vitlab.components import patch
from vitlab.components.attention import attention, rotate
from vitlab.components.norm import NoNorm
from vitlab.components.position import Together
from vitlab.components.position.additive import Learned
from vitlab.engines import batch_last, batch_last_kernels
from vitlab.geometry import DataInfo
from vitlab.models.vit import ViT
from vitlab.registry import slot
from vitlab.testing import check_component

INFO = DataInfo(image=(8, 8), channels=1, classes=3)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def test_attention_is_that_of_torch() -> None:
    """Queries, keys and values (K, 3, H, E, T, B)."""
    qkv = drawn(2, 3, 2, 3, 5, 4)
    q, k, v = qkv.permute(1, 0, 5, 2, 4, 3)  # (3, K, B, H, T, E)
    expected = F.scaled_dot_product_attention(q, k, v).permute(0, 2, 4, 3, 1)
    actual = batch_last_kernels.Attend.apply(qkv[:, 0], qkv[:, 1:], None, 3**-0.5)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    weight = drawn(*actual.shape, seed=1)
    mine, theirs = (torch.autograd.grad((out * weight).sum(), qkv)[0] for out in (actual, expected))
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    q, kv = drawn(1, 2, 2, 2, 2), drawn(1, 2, 2, 2, 3, 2, seed=1)
    for bias in (None, drawn(1, 2, 2, 3, seed=2), drawn(1, 1, 2, 3, seed=2)):
        assert torch.autograd.gradcheck(batch_last_kernels.Attend.apply, (q, kv, bias, 0.7))


@pytest.mark.parametrize("heads", [1, 2])
def test_rotation_is_that_of_attention(heads: int) -> None:
    """Of angles of each head, or of one for both; values are left as they are."""
    kv, angle_KHPT1 = drawn(2, 2, 2, 4, 5, 3), drawn(2, heads, 2, 5, 1, seed=1)
    actual = batch_last_kernels.Rotate.apply(kv, angle_KHPT1.cos(), angle_KHPT1.sin())
    for member in range(2):
        angle_HTP = angle_KHPT1[member, ..., 0].mT
        expected = rotate(kv[member, 0].permute(3, 0, 2, 1), (angle_HTP.cos(), angle_HTP.sin()))
        torch.testing.assert_close(actual[member, 0].permute(3, 0, 2, 1), expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(actual[:, 1], kv[:, 1])
    fixed = [each.detach() for each in (angle_KHPT1.cos(), angle_KHPT1.sin())]
    assert torch.autograd.gradcheck(batch_last_kernels.Rotate.apply, (kv, *fixed))
    assert torch.autograd.gradcheck(
        lambda kv, angle: batch_last_kernels.Rotate.apply(kv, angle.cos(), angle.sin()), (kv, angle_KHPT1)
    )


def test_layer_norm_is_that_of_torch() -> None:
    x_KDM, weight_KD, bias_KD = drawn(2, 5, 6), drawn(2, 5, seed=1), drawn(2, 5, seed=2)
    actual = batch_last_kernels.Normalise.apply(x_KDM, weight_KD, bias_KD, 1e-3)
    for member in range(2):
        expected = F.layer_norm(x_KDM[member].T, (5,), weight_KD[member], bias_KD[member], 1e-3).T
        torch.testing.assert_close(actual[member], expected, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(batch_last_kernels.Normalise.apply, (x_KDM, weight_KD, bias_KD, 1e-3))


def test_patches_are_those_of_a_convolution() -> None:
    x_KBCHW, weight = drawn(2, 3, 2, 8, 6), drawn(5, 2, 4, 3, seed=1)
    actual = patch.cut_patches(x_KBCHW, (4, 3)) @ weight.flatten(1).T
    expected = F.conv2d(x_KBCHW.flatten(0, 1), weight, stride=(4, 3)).flatten(2).transpose(1, 2)
    torch.testing.assert_close(actual.flatten(0, 1), expected, rtol=1e-12, atol=1e-12)


def incompatibility(model: Any) -> str | None:
    return batch_last.model_incompatibility(model, "fp64", torch.device("cpu"))


def built(**options: Any) -> Any:
    choice = {"type": "vit", "patch_size": 4, "dim": 8, "depth": 2, "heads": 2, **options}
    return slot("model").build(choice, INFO)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"attention": {"type": "auto", "drop": 0.1}}, "blocks.0.attn drops weights"),
        ({"attention": {"type": "split", "qk_norm": "layernorm"}}, "blocks.0.attn normalises queries and keys"),
        ({"attention": {"type": "split", "norm": "layernorm"}}, "blocks.0.attn.norm is a LayerNorm"),
        ({"blocks": {"1": {"attention": "linear"}}}, "blocks.1.attn is a Linear"),
    ],
)
def test_what_is_not_known_is_said(options: dict[str, Any], sentence: str) -> None:
    reason = incompatibility(built(**options))
    assert reason is not None and sentence in reason


def test_a_class_of_somebody_else_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be it derived from one that is: it may do another thing."""
    assert incompatibility(built()) is None

    class Mine(attention.get("explicit")):  # type: ignore[misc]
        pass

    model = built()
    model.blocks[1].attn.__class__ = Mine
    assert "blocks.1.attn is a Mine" in (incompatibility(model) or "")
    assert "a ResNet8 is not supported" in (incompatibility(slot("model").build({"type": "resnet8"}, INFO)) or "")


def test_a_model_that_may_do_another_thing_is_not_known() -> None:
    """What is told here is never asked of the model: it would be trained as if it had not changed it."""
    model = built()
    assert incompatibility(model) is None
    model.__class__ = type("Mine", (ViT,), {})
    assert "a Mine is not supported" in (incompatibility(model) or "")


def test_a_block_of_somebody_else_is_not_known() -> None:
    model = built()
    model.blocks[1].__class__ = type("Mine", (type(model.blocks[1]),), {})
    assert incompatibility(model) == "blocks.1 is a Mine, which is not supported by engine batch_last"


def test_a_part_of_somebody_else_in_an_attention_is_not_known() -> None:
    model = built()
    part = model.blocks[1].attn.qkv
    part.__class__ = type("Mine", (type(part),), {})
    assert incompatibility(model) == "blocks.1.attn.qkv is a Mine, which is not supported by engine batch_last"


def test_a_hook_is_not_passed_over() -> None:
    """An objective may read what a part returns, and this engine calls no part."""
    model = built()
    model.blocks[1].mlp.register_forward_hook(lambda module, inputs, output: 2 * output)
    assert "supports no model with hooks" in (incompatibility(model) or "")


def test_norms_of_queries_count_by_what_they_are() -> None:
    model = built()
    attend = model.blocks[0].attn
    attend.q_norm.__class__ = type("Mine", (NoNorm,), {"forward": lambda self, x: 2 * x})
    assert "blocks.0.attn normalises queries" in (incompatibility(model) or "")


@pytest.mark.parametrize(
    "position", [*slot("position").names(), ["learned", "rope2d", "alibi2d"], ["learned", "sincos2d", "conditional"]]
)
def test_positions_and_their_gradients_are_those_of_the_model(position: Any) -> None:
    choice = {"type": "vit", "patch_size": 2, "dim": 8, "depth": 2, "heads": 2, "position": position}
    models = [slot("model").build(choice, INFO).double() for _ in range(2)]
    for seed, model in enumerate(models):
        model.initialise(seed)
        with torch.no_grad():
            for tensor in model.parameters():  # a bias that starts from 0 would show nothing
                tensor += 0.1 * torch.randn_like(tensor)
    assert incompatibility(models[0]) is None
    x_BCHW = drawn(3, 1, 8, 8).detach()
    rows, kept = stack_module_state(models)
    actual = batch_last.BatchLastForward(models[0], {**rows, **kept}).features(x_BCHW[None])
    weight = torch.randn_like(actual)
    names = [name for name in rows if not name.startswith("head.")]
    gradients = torch.autograd.grad((actual * weight).sum(), [rows[name] for name in names])
    for member, model in enumerate(models):
        expected = model.forward_features(x_BCHW)
        torch.testing.assert_close(actual[member], expected, rtol=1e-9, atol=1e-10)
        parameters = [model.get_parameter(name) for name in names]
        theirs = torch.autograd.grad((expected * weight[member]).sum(), parameters)
        mine = [gradient[member] for gradient in gradients]
        torch.testing.assert_close(
            dict(zip(names, mine, strict=True)), dict(zip(names, theirs, strict=True)), rtol=1e-8, atol=1e-10
        )


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({}, 1),
        ({"position": "rope2d_mixed", "drop": 0.2, "drop_path": 0.3, "layer_scale": 0.1}, 1),
        ({"position": ["conditional", "relative_bias"], "mlp": {"type": "gelu", "drop": 0.2}}, 1),
        ({"attention": {"type": "per_head", "proj_drop": 0.2}, "head": "mlp", "registers": 2}, 1),
        ({"attention": {"type": "auto", "qkv_bias": "qv"}}, 1),
        ({"prefix": ["class", "distillation"], "head": "distilled", "position": "alibi2d"}, 2),
    ],
)
def test_last_block_computes_what_the_head_reads(options: dict[str, Any], tokens: int) -> None:
    """With the same gradients and the same draws as for all tokens."""
    models = [built(**options).double() for _ in range(2)]
    for seed, model in enumerate(models):
        model.initialise(seed)
    assert batch_last.count_tokens_head_reads(models[0]) == tokens
    rows, kept = stack_module_state(models)
    keys_K = torch.arange(2)
    draws = noise.Draws(keys_K, keys_K, torch.arange(3).expand(2, 3), step=keys_K)
    forward = batch_last.BatchLastForward(models[0], {**rows, **kept}, draws)
    x_KBCHW = drawn(2, 3, 1, 8, 8).detach()
    few, every = forward.features(x_KBCHW, tokens), forward.features(x_KBCHW)[:, :, :tokens]
    torch.testing.assert_close(few, every, rtol=1e-12, atol=1e-12)
    weight = torch.randn_like(few)
    mine, theirs = (
        torch.autograd.grad((each * weight).sum(), list(rows.values()), allow_unused=True) for each in (few, every)
    )
    named = [{n: g for n, g in zip(rows, each, strict=True) if g is not None} for each in (mine, theirs)]
    torch.testing.assert_close(*named, rtol=1e-10, atol=1e-12)


def test_last_block_computes_all_tokens_if_others_may_be_read() -> None:
    assert batch_last.count_tokens_head_reads(built(head={"type": "linear", "pool": "gap"})) is None
    assert batch_last.count_tokens_head_reads(built(position="conditional", depth=1)) is None
    assert batch_last.count_tokens_head_reads(built(norm="rmsnorm")) is None, (
        "it is not known to compute token by token"
    )
    derived, mixing, together = built(), built(), built(position=["learned", "rope2d"])
    derived.head.__class__ = type("Mine", (type(derived.head),), {})
    mixing.position.__class__ = type("Mine", (Learned,), {"mix": lambda self, x_BTD, layer: x_BTD.flip(1)})
    together.position.__class__ = type("Mine", (Together,), {"mix": lambda self, x_BTD, layer: x_BTD.flip(1)})
    for model in (derived, mixing, together):
        assert batch_last.count_tokens_head_reads(model) is None


def test_a_derived_list_of_encodings_does_its_own_work() -> None:
    models = [built(position=["learned", "rope2d"]).double().eval() for _ in range(2)]
    for model in models:
        model.position.__class__ = type("Mine", (Together,), {"mix": lambda self, x_BTD, layer: x_BTD.flip(1)})
    rows, kept = stack_module_state(models)
    x_BCHW = drawn(3, 1, 8, 8).detach()
    actual = batch_last.BatchLastForward(models[0], {**rows, **kept}).features(x_BCHW[None])
    torch.testing.assert_close(actual[1], models[1].forward_features(x_BCHW), rtol=1e-9, atol=1e-10)


def test_hints_of_a_derived_position_are_followed() -> None:
    """A layer without any has none."""

    def bias(self: Any, layer: int) -> Tensor | None:
        return torch.arange(25.0, dtype=torch.float64).view(1, 5, 5) if layer == 2 else None

    models = [built().double().eval() for _ in range(2)]
    for model in models:
        model.position.__class__ = type("Mine", (Learned,), {"bias": bias})
    rows, kept = stack_module_state(models)
    x_BCHW = drawn(3, 1, 8, 8).detach()
    actual = batch_last.BatchLastForward(models[0], {**rows, **kept}).features(x_BCHW[None])
    torch.testing.assert_close(actual[1], models[1].forward_features(x_BCHW), rtol=1e-9, atol=1e-10)
    models[1].position.__class__ = Learned
    assert not torch.allclose(actual[1], models[1].forward_features(x_BCHW))


@pytest.mark.parametrize(
    ("at", "method"),
    [
        ("position", "add"),
        ("pos_drop", "forward"),
        ("blocks.0.norm1", "forward"),
        ("blocks.0.ls1", "forward"),
        ("blocks.0.drop_path2", "forward"),
        ("blocks.0.mlp.act", "forward"),
        ("blocks.0.mlp.drop1", "forward"),
        ("norm", "forward"),
    ],
)
def test_parts_of_derived_classes_do_their_own_work(at: str, method: str) -> None:
    """Two models with a part that doubles what its base does predict what they predict one by one."""
    models = [built(norm="none").double().eval() for _ in range(2)]
    x_KBCHW = drawn(2, 3, 1, 8, 8).detach()
    for seed, model in enumerate(models):
        model.initialise(seed)
        part, base = model.get_submodule(at), type(model.get_submodule(at))
        before = model.forward_features(x_KBCHW[seed])

        def twice(self: Any, *given: Any, base: Any = base) -> Any:
            return 2 * getattr(base, method)(self, *given)

        part.__class__ = type("Mine", (base,), {method: twice})
        assert not torch.allclose(model.forward_features(x_KBCHW[seed]), before)
    assert incompatibility(models[0]) is None
    rows, kept = stack_module_state(models)
    keys_K = torch.arange(2)
    draws = noise.Draws(keys_K, keys_K, torch.arange(3).expand(2, 3), step=keys_K)
    actual = batch_last.BatchLastForward(models[0], {**rows, **kept}, draws).features(x_KBCHW)
    for member, model in enumerate(models):
        torch.testing.assert_close(actual[member], model.forward_features(x_KBCHW[member]), rtol=1e-9, atol=1e-10)


def test_it_is_for_processors_and_full_precision() -> None:
    model, cpu = built(), torch.device("cpu")
    assert [batch_last.model_incompatibility(model, precision, cpu) for precision in ("fp32", "fp64")] == [None, None]
    assert "precision bf16" in (batch_last.model_incompatibility(model, "bf16", cpu) or "")
    assert "this is cuda" in (batch_last.model_incompatibility(model, "fp32", torch.device("cuda")) or "")


def test_contract_of_parts_sees_dependence_on_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as of a part that views its input by strides; this engine has the images last in memory."""
    rms = slot("norm").resolve_choice("rmsnorm")
    plain = rms.component.forward  # type: ignore[attr-defined]
    monkeypatch.setattr(rms.component, "forward", lambda self, x: plain(self, x) * (1 if x.is_contiguous() else 1.001))
    with pytest.raises(AssertionError, match=r"stacked by torch.vmap, its tokens in evaluation differs"):
        check_component("norm", "rmsnorm")
