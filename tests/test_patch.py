"""Tests of patch embeddings against the formula, timm's modules, and explicit convolutions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from slot_fixtures import refusal
from torch import Tensor, nn

from vitlab.components.patch import PatchEmbedding, patch
from vitlab.data.torchvision_import import torchvision
from vitlab.errors import OptionError
from vitlab.geometry import Geometry


def geometry(
    image: tuple[int, int], size: tuple[int, int], *, reduction: int = 1, channels: int = 3, dim: int = 16
) -> Geometry:
    return Geometry(
        image=image,
        channels=channels,
        patch=size,
        reduction=reduction,
        prefix=("class",),
        dim=dim,
        depth=1,
        heads=2,
        classes=2,
    )


def build(name: str, g: Geometry, **options: Any) -> PatchEmbedding:
    torch.manual_seed(0)
    return patch.build({"type": name, **options}, g)


@pytest.mark.parametrize(("image", "size"), [((8, 8), (4, 4)), ((6, 8), (3, 2)), ((5, 12), (5, 4))])
def test_linear_applies_one_matrix_to_all_patches(image: tuple[int, int], size: tuple[int, int]) -> None:
    g = geometry(image, size)
    module = build("linear", g)
    x = torch.randn(2, 3, *image)
    tokens = module(x)
    assert tokens.shape == (2, g.patches, 16)
    weight, bias = module.state_dict()["proj.weight"].double(), module.state_dict()["proj.bias"].double()
    for row in range(g.grid[0]):
        for column in range(g.grid[1]):
            cut = x[:, :, row * size[0] : (row + 1) * size[0], column * size[1] : (column + 1) * size[1]]
            expected = cut.flatten(1).double() @ weight.flatten(1).T + bias
            torch.testing.assert_close(tokens[:, row * g.grid[1] + column].double(), expected, atol=1e-5, rtol=0)


def test_linear_options() -> None:
    g = geometry((8, 8), (4, 4))
    assert set(build("linear", g, bias=False).state_dict()) == {"proj.weight"}
    plain, normed = build("linear", g), build("linear", g, norm="layernorm")
    normed.load_state_dict(plain.state_dict(), strict=False)
    x = torch.randn(2, 3, 8, 8)
    expected = torch.nn.functional.layer_norm(plain(x), (16,), eps=1e-6)
    torch.testing.assert_close(normed(x), expected)
    with pytest.raises(OptionError, match=r"no norm called 'layrnorm'.*layernorm"):
        build("linear", g, norm="layrnorm")


def test_linear_loads_timm_state() -> None:
    torchvision()  # timm imports torchvision, whose import may need a workaround
    reference = pytest.importorskip("timm.layers").PatchEmbed(img_size=(8, 12), patch_size=(4, 3), embed_dim=16)
    module = build("linear", geometry((8, 12), (4, 3)))
    module.load_state_dict(reference.state_dict())
    x = torch.randn(2, 3, 8, 12)
    torch.testing.assert_close(module(x), reference(x))


@pytest.mark.parametrize("norm", ["batchnorm", "groupnorm"])
@pytest.mark.parametrize(
    ("size", "strides"),
    [((8, 8), [(2, 2), (2, 2), (2, 2)]), ((2, 8), [(2, 2), (1, 2), (1, 2)]), ((1, 1), [])],
)
def test_conv_stem_equals_its_layers(norm: str, size: tuple[int, int], strides: list[tuple[int, int]]) -> None:
    g = geometry((8, 16), size)
    module = build("conv_stem", g, norm=norm)
    widths = [3, 4, 8, 16]
    layers: list[nn.Module] = []
    for index, stride in enumerate(strides):
        width = widths[index + 1]
        layers += [nn.Conv2d(widths[index], width, 3, stride, 1, bias=False)]
        layers += [nn.BatchNorm2d(width) if norm == "batchnorm" else nn.GroupNorm(1, width), nn.ReLU()]
    layers += [nn.Conv2d(widths[len(strides)], 16, 1)]
    reference = nn.Sequential(*layers)
    reference.load_state_dict(dict(zip(reference.state_dict(), module.state_dict().values(), strict=True)))
    x = torch.randn(2, 3, 8, 16)
    tokens = module(x)
    assert tokens.shape == (2, g.patches, 16)
    torch.testing.assert_close(tokens, reference(x).flatten(2).transpose(1, 2))


def test_conv_stem_has_channels_of_paper() -> None:
    """ViT_C-4GF: 48, 96, 192, 384 channels before a 1x1 to 384."""
    g = geometry((224, 224), (16, 16), dim=384)
    with torch.device("meta"):
        shapes = {name: tuple(value.shape) for name, value in build("conv_stem", g).named_parameters()}
    widths = [shapes[f"convs.{layer}.conv.weight"][0] for layer in range(4)]
    assert widths == [48, 96, 192, 384] and shapes["proj.weight"] == (384, 384, 1, 1)
    reason = patch.get("conv_stem").incompatibility(geometry((12, 12), (6, 6)), {})
    assert reason is not None and "needs a patch_size that is a power of 2; found 6" in reason
    assert "a power of 2" in refusal(patch, "conv_stem", geometry((12, 12), (6, 6)))


def hybrid(**options: Any) -> Any:
    torchvision()  # timm imports torchvision, whose import may need a workaround
    timm = pytest.importorskip("timm")
    torch.manual_seed(4)
    return timm.create_model(depth=1, num_classes=0, **options).patch_embed


def randomised(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5 + (parameter.ndim == 1))
            if parameter.ndim == 4:  # filters of all sizes, down to where the epsilon of their variance counts
                parameter.mul_(10 ** (-4 * torch.rand(len(parameter), 1, 1, 1)))
    return module


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "image", "size", "layers"),
    [
        ("vit_base_r50_s16_224", (32, 48), 1, (3, 4, 9)),
        ("vit_small_r26_s32_224", (64, 32), 1, (2, 2, 2, 2)),
        ("vit_tiny_r_s16_p8_224", (64, 32), 8, ()),
    ],
)
def test_resnet_equals_timm_hybrids(model: str, image: tuple[int, int], size: int, layers: tuple[int, ...]) -> None:
    dim = 16
    reference = randomised(hybrid(model_name=model, img_size=image, embed_dim=dim, num_heads=2)).eval()
    reduction = patch.get("resnet").reduction_of({"layers": layers})
    module = build("resnet", geometry(image, (size, size), reduction=reduction, dim=dim), layers=layers)
    module.load_state_dict(reference.state_dict())
    x = torch.randn(1, 3, *image)
    with torch.no_grad():
        ours, theirs = module(x), reference(x)
    assert ours.shape == theirs.shape
    torch.testing.assert_close(ours, theirs, atol=1e-5 * float(theirs.abs().max()), rtol=0)


@pytest.mark.parametrize("image", [(33, 47), (20, 28)])
def test_padding_equals_tensorflow_for_any_size(image: tuple[int, int]) -> None:
    """Sizes that are no multiple of the stride: the output has ceil(size / stride) positions."""
    reference = randomised(hybrid(model_name="vit_tiny_r_s16_p8_224", img_size=64, embed_dim=16, num_heads=2))
    module = build("resnet", geometry((64, 64), (8, 8), reduction=4), layers=())
    module.load_state_dict(reference.state_dict())
    x = torch.randn(1, 3, *image)
    ours: Tensor = module.backbone(x)  # type: ignore[operator]
    assert ours.shape[2:] == (-(-image[0] // 4), -(-image[1] // 4))
    torch.testing.assert_close(ours, reference.backbone(x), atol=1e-5, rtol=1e-5)


def test_resnet_narrow_and_wide() -> None:
    """width_factor is that of timm's ResNetV2; 0.25 is for small models."""
    torchvision()  # timm imports torchvision, whose import may need a workaround
    reference = pytest.importorskip("timm.models.resnetv2").ResNetV2(
        [1, 2], width_factor=2, num_classes=0, preact=False, stem_type="same", in_chans=1
    )
    module = build("resnet", geometry((16, 16), (1, 1), reduction=8, channels=1), layers=[1, 2], width_factor=2)
    ours = {name: value.shape for name, value in module.state_dict().items() if name.startswith("backbone.")}
    assert ours == {f"backbone.{name}": value.shape for name, value in reference.state_dict().items()}
    narrow = build("resnet", geometry((16, 16), (1, 1), reduction=8, channels=1), layers=[1, 1], width_factor=0.25)
    assert narrow(torch.randn(2, 1, 16, 16)).shape == (2, 4, 16)


CASES: list[tuple[str, Geometry, dict[str, Any]]] = [
    ("linear", geometry((8, 12), (4, 2)), {}),
    ("conv_stem", geometry((8, 12), (4, 2)), {}),
    ("conv_stem", geometry((8, 12), (4, 2)), {"norm": "groupnorm"}),
    ("resnet", geometry((16, 32), (1, 2), reduction=8), {"layers": [1, 1], "width_factor": 0.125}),
]


@pytest.mark.parametrize(("name", "g", "options"), CASES)
def test_every_parameter_learns_in_every_dtype_and_on_every_device(
    name: str, g: Geometry, options: dict[str, Any]
) -> None:
    x = torch.randn(3, 3, *g.image)
    module = build(name, g, **options)
    module(x).pow(3).sum().backward()
    for key, parameter in module.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, key
    assert build(name, g, **options).bfloat16()(x.bfloat16()).dtype == torch.bfloat16
    with torch.device("meta"):
        assert build(name, g, **options)(torch.randn(2, 3, *g.image)).shape == (2, g.patches, 16)


@pytest.mark.parametrize(("name", "g", "options"), CASES)
def test_replicates_can_be_stacked(name: str, g: Geometry, options: dict[str, Any]) -> None:
    members = [patch.build({"type": name, **options}, g) for _ in range(2)]
    parameters, buffers = torch.func.stack_module_state(members)
    x = torch.randn(2, 3, 3, *g.image)

    def call(parameters: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(members[0], (parameters, buffers), (x,))

    stacked = torch.func.vmap(call)(parameters, buffers, x)
    for index, member in enumerate(members):
        torch.testing.assert_close(stacked[index], member(x[index]), atol=1e-4, rtol=1e-4)
