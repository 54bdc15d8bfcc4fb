"""Tests of dropped patches: against timm with equal draws, keyed, stacked, and refused where every patch is needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vitlab import noise
from vitlab.components.base import PatchDrop, set_dropout_ids
from vitlab.components.head import Distilled
from vitlab.data.torchvision_import import torchvision
from vitlab.engines.batch_last import model_incompatibility
from vitlab.geometry import DataInfo
from vitlab.models import ViT, model

torchvision()  # timm imports torchvision, whose import may need a workaround
timm = pytest.importorskip("timm")
from timm.layers import patch_dropout  # noqa: E402
from timm.models.vision_transformer import VisionTransformer  # noqa: E402

DATA = DataInfo(image=(16, 24), channels=3, classes=5)
SIZES = {"dim": 24, "depth": 2, "heads": 3, "patch_size": 4}
DRAWS = noise.Draws(dropout=3, drop_path=4, sample_B=torch.tensor([7, 9, 11]), step=5)


def images(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(3, 3, *DATA.image, generator=torch.Generator().manual_seed(1)).to(dtype)


def build(**options: Any) -> ViT:
    built = model.build({"type": "vit", **SIZES, **options}, DATA)
    assert isinstance(built, ViT)
    built.initialise(0)
    return built


def keyed(built: ViT) -> Tensor:
    """Return the uniform draws from which the model chooses the patches of each image."""
    assert built.patch_drop.place is not None
    return noise.uniform(noise.fold(DRAWS.dropout, built.patch_drop.place), DRAWS.sample_B, 24)


@pytest.mark.parametrize(("share", "registers"), [(0.5, 0), (0.3, 2), (0.99, 0)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_training_equals_timm_with_equal_draws(
    share: float, registers: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = build(patch_drop=share, registers=registers).to(dtype).train()
    theirs = VisionTransformer(
        img_size=DATA.image, patch_size=4, embed_dim=24, depth=2, num_heads=3, num_classes=5, reg_tokens=registers,
        patch_drop_rate=share,
    ).to(dtype).train()  # fmt: skip
    theirs.load_state_dict(ours.to_canonical(ours.state_dict()))
    x_BCHW = images(dtype)
    monkeypatch.setattr(patch_dropout.torch, "randn", lambda *shape, device: keyed(ours))
    expected = theirs(x_BCHW)
    monkeypatch.undo()
    with noise.use_model_draws(DRAWS):
        mine = ours.logits_by_head(ours(x_BCHW))[""]
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(mine, expected, rtol=tolerance, atol=tolerance)
    for logits in (mine, expected):
        nn.functional.cross_entropy(logits, torch.tensor([0, 1, 4])).backward()
    gradients = ours.to_canonical({name: p.grad for name, p in ours.named_parameters() if p.grad is not None})
    for name, p in theirs.named_parameters():
        torch.testing.assert_close(gradients[name], p.grad, rtol=tolerance, atol=tolerance)


def test_evaluation_keeps_all_patches() -> None:
    dropping, plain = build(patch_drop=0.5).eval(), build().eval()
    dropping.load_state_dict(plain.state_dict())
    x = images(torch.float32)
    assert torch.equal(dropping(x).logits, plain(x).logits)
    with noise.use_model_draws(DRAWS):
        assert not torch.equal(dropping.train()(x).logits, plain.train()(x).logits)


def test_patches_of_a_sample_do_not_depend_on_its_batch_and_are_drawn_uniformly() -> None:
    part = nn.Sequential(PatchDrop(0.25, prefix=2))
    set_dropout_ids(part)
    x = torch.arange(18.0).view(1, 18, 1).expand(4000, -1, -1)
    draws = noise.Draws(5, 6, torch.arange(4000), 7)
    with noise.use_model_draws(draws):
        out = part(x)[..., 0]
    assert out.shape == (4000, 14) and (out[:, :2] == torch.tensor([0.0, 1.0])).all()
    assert (out.diff(dim=1) > 0).all()
    shares = torch.bincount(out[:, 2:].long().flatten(), minlength=18)[2:] / 4000
    assert (shares - 0.75).abs().max() < 5 * (0.75 * 0.25 / 4000) ** 0.5
    with noise.use_model_draws(draws._replace(sample_B=torch.tensor([17]))):
        assert torch.equal(part(x[:1])[0, :, 0], out[17])


def test_stacked_models_drop_their_own_patches() -> None:
    part = nn.Sequential(PatchDrop(0.5, prefix=1))
    set_dropout_ids(part)
    x_KBTD = torch.randn(2, 3, 9, 4, generator=torch.Generator().manual_seed(0))
    sample_KB = torch.tensor([[0, 1, 2], [2, 5, 6]])

    def one(key: Tensor, sample_B: Tensor, x_BTD: Tensor) -> Tensor:
        with noise.use_model_draws(noise.Draws(key, key, sample_B, key)):
            out: Tensor = part(x_BTD)
            return out

    stacked = torch.vmap(one)(torch.tensor([11, 12]), sample_KB, x_KBTD)
    for k, key in enumerate((11, 12)):
        with noise.use_model_draws(noise.Draws(key, key, sample_KB[k], key)):
            assert torch.equal(stacked[k], part(x_KBTD[k]))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"position": "rope2d"}, "position 'rope2d' places every patch in the blocks"),
        ({"position": "relative_bias"}, "position 'relative_bias' places every patch in the blocks"),
        ({"position": "conditional"}, "position 'conditional' places every patch in the blocks"),
        ({"position": {"type": "learned", "where": "every_layer"}}, "position 'learned' places every patch"),
    ],
)
def test_parts_that_need_every_patch_are_refused(options: dict[str, Any], sentence: str) -> None:
    reason = ViT.incompatibility(DATA, {**SIZES, "patch_drop": 0.5, **options})
    assert reason is not None and reason.startswith(sentence)
    assert ViT.incompatibility(DATA, {**SIZES, **options}) is None


def test_segmentation_needs_every_patch() -> None:
    data = DataInfo(image=(16, 24), channels=3, classes=5, task="segmentation")
    reason = ViT.incompatibility(data, {**SIZES, "patch_drop": 0.5, "head": "segmentation"})
    assert (
        reason
        == "head 'segmentation' reads every patch, and patch_drop 0.5 removes some; use another head, or patch_drop: 0"
    )


def test_heads_with_a_forward_of_their_own_declare_what_they_read(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {**SIZES, "patch_drop": 0.5, "prefix": ("class", "distillation"), "head": "distilled"}
    assert ViT.incompatibility(DATA, options) is None
    monkeypatch.setattr(Distilled, "forward", lambda self, x_BTD: self.classify(self.pool(x_BTD)))
    assert ViT.incompatibility(DATA, options) is None
    monkeypatch.setattr(Distilled, "reads", None)
    reason = ViT.incompatibility(DATA, options)
    assert reason is not None and reason.startswith("head 'distilled' has a forward of its own, which may need every")


def test_batch_last_and_keys() -> None:
    choice = {"type": "vit", **SIZES, "patch_drop": 0.5}
    assert model_incompatibility(build(patch_drop=0.5), "fp64", torch.device("cpu")) == (
        "patch_drop is not supported by engine batch_last"
    )
    work = ViT.work(DATA, model.resolve_choice(choice).options)
    assert work is not None and work.products is None
    assert (
        model.resolve_choice({**choice, "patch_drop": 0}).hashed()
        == model.resolve_choice({"type": "vit", **SIZES}).hashed()
    )
    assert model.resolve_choice(choice).hashed()["patch_drop"] == 0.5
