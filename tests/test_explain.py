"""Tests of explanations: numbers against formulas or float64 computations, and checks of figures."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from PIL import Image

import vitlab
from vitlab.components.attention import Attention
from vitlab.components.attention.softmax import SDPA
from vitlab.components.head import Logits
from vitlab.data.pixels import IGNORED
from vitlab.data.torchvision_import import torchvision
from vitlab.driver.explanations import fit_as_data, read_image
from vitlab.driver.session import Watch
from vitlab.errors import ByName, SpecError, UserError, VitlabError
from vitlab.explaining import one_image, pictures
from vitlab.explaining.attribution import integrated_gradients, patch_grid
from vitlab.explaining.capture import capture
from vitlab.explaining.measures import (
    attention_distance,
    attention_to_patch_maps,
    patch_distances,
    position_similarity,
    rollout,
    token_norm_statistics,
)
from vitlab.explaining.one_image import Subject, common_scales, explain, write_explanation, write_side_by_side
from vitlab.explaining.pictures import Map, Scale
from vitlab.geometry import DataInfo, Geometry
from vitlab.models import ViT
from vitlab.models.baselines import Prior
from vitlab.models.convnet import ResNet8
from vitlab.report.sections.explained import reasons_file


def geometry(image: int, patch: int, prefix: tuple[str, ...] = ("class",)) -> Geometry:
    return Geometry(
        image=(image, image),
        channels=3,
        patch=(patch, patch),
        prefix=prefix,
        dim=8,
        depth=2,
        heads=2,
        classes=3,
    )


def random_maps(*shape: int, blocks: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64).mul(2).softmax(-1) for _ in range(blocks)]


# Uniform attention, from the formula summed by an independent script: image, patch, mean distance in pixels.
UNIFORM = [(224, 16, 116.492), (224, 32, 115.503), (224, 14, 116.565), (32, 4, 16.546), (32, 2, 16.652)]


@pytest.mark.parametrize(("image", "patch", "expected"), UNIFORM)
def test_uniform_attention_has_mean_distance_of_grid(image: int, patch: int, expected: float) -> None:
    g = geometry(image, patch, ())
    maps = torch.full((1, 2, g.tokens, g.tokens), 1 / g.tokens, dtype=torch.float64)
    assert attention_distance(maps, g).tolist() == [[pytest.approx(expected, abs=5e-4)] * 2]


def test_identity_attention_has_zero_distance_and_corners_are_farthest() -> None:
    g = geometry(224, 16, ("class",))
    maps = torch.eye(g.tokens, dtype=torch.float64).expand(1, 1, -1, -1)
    assert float(attention_distance(maps, g)) == 0
    assert float(patch_distances(g).max()) == pytest.approx(294.16, abs=5e-3)


def test_attention_to_prefix_tokens_is_no_distance() -> None:
    g = geometry(32, 8, ("class", "register"))
    maps = torch.zeros(1, 1, g.tokens, g.tokens, dtype=torch.float64)
    maps[..., 0] = 0.5
    maps[..., 2:] = 0.5 / g.patches
    uniform = float(patch_distances(g).mean())
    assert float(attention_distance(maps, g)) == pytest.approx(uniform / 2)


def test_distances_on_oblong_grid() -> None:
    g = replace(geometry(32, 8), image=(16, 32), patch=(8, 8))
    assert float(patch_distances(g)[0, 7]) == pytest.approx(np.hypot(8, 24))


def test_rollout_equals_numpy_per_image() -> None:
    maps = random_maps(3, 4, 7, 7)
    rolled = rollout(maps)
    for image in range(3):
        product = np.eye(7)
        for block in maps:
            step = block[image].numpy().mean(axis=0) + np.eye(7)
            product = (step / step.sum(axis=1, keepdims=True)) @ product
        np.testing.assert_allclose(rolled[image].numpy(), product, atol=1e-14)
    torch.testing.assert_close(rolled.sum(-1), torch.ones(3, 7, dtype=torch.float64))


def test_rollout_peaks_at_planted_patch() -> None:
    g = geometry(32, 8, ("class", "register"))
    maps = [torch.full((1, 2, g.tokens, g.tokens), 1e-3, dtype=torch.float64) for _ in range(2)]
    planted = 2 + 1 * 4 + 3
    for block in maps:
        block[..., planted] = 1
        block /= block.sum(-1, keepdim=True)
    heat = attention_to_patch_maps(rollout(maps), g, ("class",))["class"][0]
    assert divmod(int(heat.argmax()), 4) == (1, 3)


def test_rollout_covers_tokens_of_model() -> None:
    both = ("class", "distillation")
    assert set(attention_to_patch_maps(rollout(random_maps(1, 2, 18, 18)), geometry(32, 8, both), both)) == set(both)
    g = geometry(32, 8, ())
    rolled = rollout(random_maps(1, 2, 16, 16))
    mean = attention_to_patch_maps(rolled, g, ("class",))
    assert list(mean) == ["mean"]
    torch.testing.assert_close(mean["mean"].flatten(1), rolled.mean(1))


def test_position_similarity_is_cosine() -> None:
    g = geometry(16, 8, ())
    table = torch.tensor([[1.0, 0], [0, 2], [-3, 0], [1, 1]])
    similarity = position_similarity(table, g)
    assert similarity.shape == (2, 2, 2, 2)
    assert similarity[0, 0].flatten().tolist() == pytest.approx([1, 0, -1, 2**-0.5])


def test_token_norm_outliers_scale_with_model() -> None:
    g = geometry(32, 4, ("class",))
    tokens = torch.randn(1, g.tokens, 16, generator=torch.Generator().manual_seed(2))
    tokens[0, 0] = 1e6  # the class token is no patch
    assert token_norm_statistics(tokens, g).outliers == 0
    tokens[0, 5] *= 100
    for scale in (1, 400):
        norms = token_norm_statistics(tokens * scale, g)
        assert norms.outliers == 1 / g.patches and norms.ratio > 50


def test_border_without_positions_does_not_create_outliers() -> None:
    """Equal patches without positions are equal tokens, so more than half of the norms may be one number."""
    g = geometry(32, 4, ())
    tokens = torch.ones(1, g.tokens, 16)
    tokens[0, :20] = torch.linspace(1.5, 2, 20)[:, None]
    assert token_norm_statistics(tokens, g).outliers == 0
    tokens[0, 0] = 500
    assert token_norm_statistics(tokens, g).outliers == 1 / g.patches


# -- capture ----------------------------------------------------------------------------------------------------------


def tiny(task: str = "classification", image: tuple[int, int] = (8, 12), **options: Any) -> ViT:
    data = DataInfo(image=image, channels=3, classes=4, task=task)  # type: ignore[arg-type]
    built = ViT(data, **{"dim": 16, "depth": 2, "heads": 2, "patch_size": 4, **options})
    built.initialise(0)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return built


@pytest.mark.parametrize("attention", ["auto", "explicit", "split", "per_head", "sdpa"])
def test_captured_maps_equal_unfused_timm(attention: str) -> None:
    torchvision()  # timm imports torchvision, whose import may need a workaround
    timm = pytest.importorskip("timm")
    ours = tiny(attention=attention).train()
    theirs = timm.models.VisionTransformer(
        img_size=(8, 12), patch_size=4, embed_dim=16, depth=2, num_heads=2, num_classes=4
    ).eval()
    theirs.load_state_dict(ours.to_canonical(ours.state_dict()))
    maps: list[torch.Tensor] = []
    for block in theirs.blocks:
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_pre_hook(lambda module, inputs: maps.append(inputs[0]))
    x = torch.randn(2, 3, 8, 12, generator=torch.Generator().manual_seed(4))
    tokens: list[torch.Tensor] = []
    theirs.blocks[0].register_forward_pre_hook(lambda module, inputs: tokens.append(inputs[0]))
    for block in theirs.blocks:
        block.register_forward_hook(lambda module, inputs, output: tokens.append(output))
    with torch.no_grad():
        logits = theirs(x)
    captured = capture(ours, x)
    for mine, its in zip(captured.tokens_LBTD, tokens, strict=True):
        torch.testing.assert_close(mine, its, atol=1e-5, rtol=0)
    assert ours.training and not any(module._forward_hooks or module._forward_pre_hooks for module in ours.modules())
    assert len(captured.maps_LBHTT) == len(maps) == 2 and len(captured.tokens_LBTD) == 3
    for mine, its in zip(captured.maps_LBHTT, maps, strict=True):
        assert its.amax() > 0.1, "maps that are all but uniform would hide a mistake"
        torch.testing.assert_close(mine, its, atol=1e-6, rtol=0)
    torch.testing.assert_close(captured.logits_BC, logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("position", ["relative_bias", "alibi2d", "rope2d", "rope2d_mixed"])
@pytest.mark.parametrize("attention", ["auto", "split", "per_head", "sdpa"])
def test_captured_maps_include_bias_and_rotation(position: str, attention: str) -> None:
    reference = tiny(position=position, attention="explicit")
    other = tiny(position=position, attention=attention)
    other.load_state_dict(other.from_canonical(reference.to_canonical(reference.state_dict())))
    x = torch.randn(2, 3, 8, 12, generator=torch.Generator().manual_seed(4))
    for mine, its in zip(capture(other, x).maps_LBHTT, capture(reference, x).maps_LBHTT, strict=True):
        torch.testing.assert_close(mine, its, atol=1e-6, rtol=0)


def test_attention_without_maps_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    built = tiny(attention="sdpa")
    monkeypatch.setattr(SDPA, "maps", Attention.maps)
    captured = capture(built, torch.zeros(1, 3, 8, 12))
    assert (captured.maps_LBHTT, captured.no_maps) == ((), "SDPA has no attention weights that sum to 1")
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in built.modules())
    explanation = explain(built, torch.ones(1, 3, 8, 12), torch.rand(8, 12, 3), (), Subject("m", "i"))
    assert list(explanation.maps) == ["attribution"] and len(explanation.norms) == 3
    assert explanation.similarity_YXYX is not None and explanation.no_attention == captured.no_maps


def test_rollout_of_half_precision_maps_is_computed_in_float32() -> None:
    rolled = rollout([maps.bfloat16() for maps in random_maps(2, 2, 9, 9)])
    torch.testing.assert_close(rolled.sum(-1), torch.ones(2, 9, dtype=torch.float64))


# -- pictures ---------------------------------------------------------------------------------------------------------


def rollout_map(heat: Any) -> Map:
    return Map.of("rollout", "attention rollout", heat, {})


def test_overlay_is_map_interpolated_between_centres_of_patches_over_image() -> None:
    generator = torch.Generator().manual_seed(6)
    image, heat = torch.rand(20, 40, 3, generator=generator), torch.rand(2, 5, generator=generator)
    over, picture = (
        np.asarray(each).astype(float)
        for each in (pictures.overlay(image.numpy(), rollout_map(heat.numpy())), pictures.to_picture(image.numpy()))
    )
    small = (image * 255).round().repeat_interleave(9, 0).repeat_interleave(9, 1)  # 360 // 40
    np.testing.assert_array_equal(picture, small.numpy())
    share = torch.nn.functional.interpolate((heat / heat.max())[None, None], size=(180, 360), mode="bilinear")[0, 0]
    expected = 0.4 * picture + 0.6 * 255 * matplotlib.colormaps["inferno"](share.numpy())[..., :3]
    assert np.abs(over - expected).max() < 2.5, "one of 256 colours, and rounding"
    assert np.abs(over - expected).mean() < 1


def test_test_image_is_named_in_python_as_in_the_command(tmp_path: Path) -> None:
    assert (read_image("test:3"), read_image("val:-1")) == ("test:3", "val:-1")
    with pytest.raises(UserError, match=r"image 3: no such file.*as test:3 or val:3$"):
        read_image("3")
    Image.new("RGB", (4, 2)).save(tmp_path / "a.png")
    assert read_image(tmp_path / "a.png").pixels.size == (4, 2)
    turned = Image.Exif()
    turned[274] = 6
    Image.new("L", (4, 2)).save(tmp_path / "b.jpg", exif=turned)
    opened = Image.open(tmp_path / "b.jpg")
    assert (read_image(opened).pixels.size, read_image(opened).pixels.mode, opened.size) == ((2, 4), "RGB", (4, 2))
    with pytest.raises(
        UserError, match=r"a picture of Pillow, such as PIL.Image.fromarray\(array\); found an object of type ndarray"
    ):
        read_image(np.zeros((4, 2)))  # type: ignore[arg-type]
    with pytest.raises(VitlabError, match="its values are floats"):
        read_image(Image.new("F", (4, 2)))
    wide = np.arange(2 * 4 * 3, dtype=np.uint8).reshape(2, 4, 3)
    folder = {"type": "image_folder", "root": str(tmp_path), "image_size": [2, 2], "num_classes": 2}
    cropped = fit_as_data(Image.fromarray(wide), folder)
    assert np.array_equal(cropped.permute(1, 2, 0), wide[:, 1:3]), "the centre, as image_folder crops"
    assert fit_as_data(Image.fromarray(wide), {"type": "digits"}).size == (4, 2)


def test_unknown_map_is_answered_by_the_nearest() -> None:
    maps = ByName(rollout_class=1, attribution=2)
    with pytest.raises(KeyError, match=r"no 'rollout' here. Did you mean 'rollout_class'\? Names: rollout_class, attr"):
        maps["rollout"]


def test_map_alone_has_a_square_of_one_colour_for_each_patch() -> None:
    heat = np.array([[0.0, 0.02], [0.01, 0.04]])
    drawn = np.asarray(pictures.render_map(rollout_map(heat), (6, 4)))
    expected = (matplotlib.colormaps["inferno"](heat / 0.04)[..., :3] * 255).round()
    np.testing.assert_allclose(drawn, expected.repeat(2, 0).repeat(3, 1), atol=1)
    assert (np.asarray(pictures.render_map(rollout_map(np.zeros((2, 2))), (2, 2))) == [0, 0, 3]).all(), (
        "no attention is no division by 0"
    )


def test_scale_of_shares_has_a_mark_at_the_mean_of_each_map() -> None:
    maps = [rollout_map(np.array([[0.1, share]]))._replace(scale=Scale(0, 0.9)) for share in (0.3, 0.9)]
    panels = {str(index): pictures.Panel(np.zeros((8, 8, 3)), each, "", False) for index, each in enumerate(maps)}
    bar = pictures.draw_models_side_by_side(panels, truth=None).axes[-1]
    assert [mark.get_position()[1] for mark in bar.texts] == pytest.approx([0.2, 0.5])
    signed = Map.of("attribution", "t", np.array([[-1.0, 1.0]]), {})
    panels = {"m": pictures.Panel(np.zeros((8, 8, 3)), signed, "", False)}
    assert not pictures.draw_models_side_by_side(panels, truth=None).axes[-1].texts


def test_panels_name_their_class_keep_percents_whole_and_leave_the_caption_free() -> None:
    facts = dict.fromkeys(("largest_share", "mean_share", "sum", "logit_difference", "probability"), 0.015)
    facts["plain_probability"] = 0.015
    facts |= {f"without_{name}": 0.015 for name in ("largest", "random_mean", "random_lowest", "random_highest")}
    facts |= {"class": "c", "patches_removed": 4, "random_above": 16}
    panels = {
        f"model {label}, seed 0": pictures.Panel(
            np.zeros((8, 8, 3)),
            Map.of("attribution", f"patches for class {label}", np.array([[-1.0, 1.0]]), facts),
            f"predicts {label} (53.9 %), not 2 (13.3 %)",
            True,
        )
        for label in (0, 1)
    }
    figure = pictures.draw_models_side_by_side(panels, truth="2")
    pictures.add_caption(figure, "study s")
    figure.draw_without_rendering()
    titles = [axis.get_title().replace("\N{NO-BREAK SPACE}", " ") for axis in figure.axes[1:3]]
    assert all(f"patches for class {label}" in title and "(13.3 %)" in title for label, title in enumerate(titles))
    lowest = min(axis.xaxis.label.get_window_extent().y0 for axis in figure.axes[1:3])
    assert figure._supxlabel.get_window_extent().y1 < lowest  # type: ignore[attr-defined]


def test_tiles_are_the_pictures_with_a_gap_after_each_and_ticks_in_their_middle() -> None:
    maps = np.random.default_rng(0).random((2, 3, 4, 5))
    axis = pictures.draw_head_maps(maps, Scale(0, 1), query="class token").axes[0]
    shown, (left, right, bottom, top) = axis.images[0].get_array(), axis.images[0].get_extent()
    for block, head in np.ndindex(2, 3):
        tile = shown[5 * block : 5 * block + 4, 6 * head : 6 * head + 5]
        np.testing.assert_array_equal(tile, maps[block, head])
        middle = left + (right - left) * (6 * head + 2.5) / 18, top + (bottom - top) * (5 * block + 2) / 10
        assert middle == pytest.approx((head + 1, block + 1))
    assert shown.mask.sum() == 10 * 18 - maps.size


def test_large_grey_image_becomes_small_picture_in_colour() -> None:
    drawn = pictures.to_picture(np.full((400, 800, 2), 0.5))
    assert (drawn.size, drawn.mode) == ((360, 180), "RGB") and set(np.asarray(drawn).flat) == {128}


def test_parts_of_a_logit_are_drawn_from_blue_over_white_to_red() -> None:
    parts = Map.of("attribution", "for and against", np.array([[-2.0, 0.0], [1.0, 2.0]]), {})
    assert parts.scale == Scale(-2, 2)
    drawn = np.asarray(pictures.render_map(parts, (2, 2))).astype(int)
    (blue, white), (_, red) = drawn
    assert blue[2] > 2 * blue[0] and white.min() > 240 and red[0] > 2 * red[2]


# -- attribution of a logit -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"attention": "split", "position": "rope2d"},
        {"attention": "differential"},
        {"head": {"type": "mlp", "pool": "map"}},
        {"head": "distilled", "prefix": ["class", "distillation"]},
        {"task": "segmentation", "head": "segmentation"},
    ],
)
def test_attribution_sums_to_difference_of_logits_and_leaves_model_as_it_was(options: dict[str, Any]) -> None:
    model = tiny(**options).double().train()
    x = torch.randn(1, 3, 8, 12, generator=torch.Generator().manual_seed(4)).double()
    state, random = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    values, difference = integrated_gradients(model, x, 2, nodes=128)
    assert model.training and all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(random, torch.get_rng_state())
    torch.testing.assert_close(dict(model.state_dict()), state, atol=0, rtol=0)
    model.eval()
    with torch.no_grad():
        logits, of_plain = (model.logits_by_head(model(each))[""][0] for each in (x, torch.zeros_like(x)))
    assert values.shape == (2, 3) and difference == pytest.approx(float((logits - of_plain)[2].mean()), abs=1e-12)
    assert float(values.sum()) == pytest.approx(difference, abs=1e-5)


def test_attribution_equals_finite_differences_along_the_line() -> None:
    """A patch's value is the integral of its own part of the logit's slope, here by a rule of 500 steps."""
    model = tiny().double().eval()
    x = torch.randn(1, 3, 8, 12, generator=torch.Generator().manual_seed(4)).double()
    step, expected = 1e-5, torch.zeros(2, 3).double()
    place = ((torch.arange(500).double() + 0.5) / 500).view(-1, 1, 1, 1)
    for row, column in np.ndindex(2, 3):
        patch = torch.zeros_like(x)
        rows, columns = slice(4 * row, 4 * row + 4), slice(4 * column, 4 * column + 4)
        patch[..., rows, columns] = x[..., rows, columns]
        with torch.no_grad():
            above, below = (model(place * x + sign * step * patch).logits[:, 1] for sign in (1, -1))
        expected[row, column] = ((above - below) / (2 * step)).mean()
    torch.testing.assert_close(integrated_gradients(model, x, 1, nodes=128)[0], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("side", "squares"), [(8, 8), (28, 14), (30, 10), (224, 14)])
def test_model_without_patches_has_the_most_squares_that_divide_its_image(side: int, squares: int) -> None:
    model = ResNet8(DataInfo(image=(side, side), channels=1, classes=3))
    assert patch_grid(model, torch.zeros(1, 1, side, side)) == (squares, squares)


def test_convnet_has_a_map_of_a_class_and_no_map_of_attention(tmp_path: Path) -> None:
    model = ResNet8(DataInfo(image=(8, 8), channels=1, classes=3)).double()
    model.initialise(0)
    x = torch.randn(1, 1, 8, 8, generator=torch.Generator().manual_seed(4)).double()
    values, difference = integrated_gradients(model, x, 1, nodes=512)
    assert values.shape == (8, 8) and float(values.sum()) == pytest.approx(difference, rel=1e-2)
    explanation = explain(model, x, torch.rand(8, 8, 1), (), Subject("m", "i"), target=1)
    assert list(explanation.maps) == ["attribution"] and explanation.no_attention.endswith("this is a ResNet8")
    names = {file.name for file in write_explanation(explanation, tmp_path, common_scales([explanation])).files}
    assert names == {"attribution.csv", "predictions.csv"}
    with pytest.raises(
        UserError, match=r"nothing to draw: .* this is a ResNet8, and its head was trained without labels"
    ):
        explain(model, x, torch.rand(8, 8, 1), (), Subject("m", "i"), head="untrained")


def test_model_that_does_not_look_at_the_image_has_a_map_of_zeros() -> None:
    values, difference = integrated_gradients(
        Prior(DataInfo(image=(8, 8), channels=1, classes=3)), torch.ones(1, 1, 8, 8), 1, 32
    )
    assert not values.any() and difference == 0


class Steep(Prior):
    """The logits of class 1 rise within a hundredth of the way from the plain image to a white one."""

    def forward(self, x_BCHW: torch.Tensor) -> Logits:
        steep_B = torch.tanh(100 * (x_BCHW.mean((1, 2, 3)) - 0.5))
        return Logits(torch.stack([torch.zeros_like(steep_B), steep_B], 1))


def test_attribution_takes_more_gradients_where_the_logit_is_steep() -> None:
    model, x = Steep(DataInfo(image=(8, 8), channels=1, classes=2)), torch.ones(1, 1, 8, 8)
    values, difference = integrated_gradients(model, x, 1, 32)
    assert difference == pytest.approx(2) and abs(float(values.sum()) - 2) > 0.1
    shown = explain(model, x, torch.ones(8, 8, 1), (), Subject("m", "i"), target=1).maps["attribution"]
    assert float(shown.values_YX.sum()) == pytest.approx(2, rel=0.05) and "sum" not in shown.facts


def test_attribution_says_when_the_logit_jumps_between_the_images() -> None:
    """Merged pairs change on the way, so the sum is not the difference, and both are written below the map."""
    model = tiny(image=(32, 32), depth=4, block={"type": "token_merging", "tokens": 8})
    x, image = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(4)), torch.rand(32, 32, 3)
    with torch.no_grad():
        difference = float((model.eval()(x).logits - model(torch.zeros_like(x)).logits)[0, 1])
    shown = explain(model, x, image, (), Subject("m", "i"), target=1).maps["attribution"]
    total = float(shown.values_YX.sum())
    assert abs(total - difference) > 0.05 * abs(difference) and shown.facts["sum"].startswith(
        "failed: off by more than 5"
    )
    written = [float(shown.facts[fact]) for fact in ("sum of all patches", "difference of the logits")]
    assert written == pytest.approx([total, difference], rel=5e-3)


def test_parts_of_a_logit_have_three_digits_and_shares_percent() -> None:
    numbers = {7.0: "+7.00", 11.7: "+11.7", -123.4: "-123", 0.0012: "+0.00120"}
    assert {value: Scale(-1.0, 1.0).format(value) for value in numbers} == numbers
    assert Scale(0.0, 1.0).format(0.07) == "7.0 %"


def test_names_of_options_stay_whole_under_pictures() -> None:
    assert (
        pictures._wrap_lines("faint on the common scale; --scale own", 30) == "faint on the common scale;\n--scale own"
    )


@pytest.mark.parametrize(
    ("head", "task"), [("trained", "classification"), ("trained", "segmentation"), ("multilabel", "")]
)
def test_probability_without_the_largest_patches_equals_that_of_a_painted_image(head: Any, task: str) -> None:
    model = tiny(task, (8, 16), head="segmentation") if task == "segmentation" else tiny(image=(8, 16))
    x, image = torch.randn(1, 3, 8, 16, generator=torch.Generator().manual_seed(4)), torch.rand(8, 16, 3)

    def percent(painted: torch.Tensor) -> str:
        with torch.no_grad():
            logits = model.logits_by_head(model.eval()(painted))[""].double()
        share = logits.sigmoid() if head == "multilabel" else logits.softmax(1)
        return f"{100 * float(share[0, 1].mean()):.1f} %"

    for shown in explain(model, x, image, (), Subject("m", "i"), head=head, target=1).maps.values():
        painted = x.clone()
        for place in shown.values_YX.argsort(None)[-2:]:
            row, column = np.unravel_index(place, (2, 4))
            painted[..., 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] = 0
        written = {"probability of class 1": percent(x), "without its 2 largest patches": percent(painted)}
        assert written.items() <= shown.facts.items()


def test_a_quarter_of_the_patches_is_left_out_the_largest_ones_and_random_ones() -> None:
    model, x = tiny(image=(16, 16)), torch.ones(1, 3, 16, 16)
    seen: list[torch.Tensor] = []
    model.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0][:, 0, ::4, ::4] == 0))
    whole = {"class": "c", "probability": 0.5}
    one = one_image._add_occlusion_checks({"m": rollout_map(np.eye(4))}, model, x, 2, whole, "trained")["m"]
    [[everything, *parts]] = seen
    hidden = torch.stack(parts)
    assert everything.all() and hidden[0].equal(torch.eye(4) == 1)
    assert hidden.sum((1, 2)).tolist() == [4] * (1 + one_image.RANDOM) and len(hidden[1:].unique(dim=0)) > 10
    with torch.no_grad():
        painted = x * ~hidden.repeat_interleave(4, 1).repeat_interleave(4, 2)[:, None]
        percent = 100 * model.eval()(painted).logits.softmax(1)[:, 2]
        plain = 100 * model(torch.zeros_like(x)).logits.softmax(1)[0, 2]
    of_random = f"{percent[1:].mean():.1f} % ({percent[1:].min():.1f} to {percent[1:].max():.1f})"
    without = {"without its 4 largest patches": f"{percent[0]:.1f} %", "without 4 random ones": of_random}
    without["check"] = f"below {sum((percent[1:] > percent[0]).tolist())} of 16 random choices"
    assert one.facts == {"probability of class c": "50.0 %", "on a plain image": f"{plain:.1f} %", **without}
    assert one.numbers["plain_probability"] == pytest.approx(float(plain) / 100, rel=1e-4)
    shares = [one.numbers[f"without_{name}"] for name in ("largest", "random_mean", "random_lowest", "random_highest")]
    expected = [float(each) for each in (percent[0], percent[1:].mean(), percent[1:].min(), percent[1:].max())]
    assert [100 * share for share in shares] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("numbers", "plain", "check"),
    [
        ({}, "20.0 %", "below 16 of 16 random choices"),
        ({"plain_probability": 0.59}, "59.0 %", "below 16 of 16 random choices"),
        ({"plain_probability": 0.61}, "61.0 %, most of it", "below 16 of 16 random choices"),
        ({"plain_probability": 0.9}, "90.0 %, more than here", "below 16 of 16 random choices"),
        ({"without_random_mean": 0.21}, "20.0 %", "below 16 of 16 random choices"),
        (
            {"without_random_mean": 0.19},
            "20.0 %",
            "below 16 of 16 random choices; these take most of the probability, too",
        ),
        (
            {"without_largest": 0.791},
            "20.0 %",
            "below 16 of 16 random choices; the probability does not fall by a point",
        ),
        ({"without_largest": 0.9}, "20.0 %", "below 16 of 16 random choices; the probability does not fall by a point"),
    ],
)
def test_check_says_when_a_map_shows_little(numbers: dict[str, float], plain: str, check: str) -> None:
    """A plain image keeps more than three quarters of 80 %, or random patches take more than three quarters of it."""
    defaults = {"class": "c", "probability": 0.8, "plain_probability": 0.2, "patches_removed": 4, "random_above": 16}
    random = {f"without_random_{name}": 0.5 for name in ("mean", "lowest", "highest")}
    one = Map.of("rollout", "m", np.eye(2), {**defaults, **random, "without_largest": 0.1, **numbers})
    assert (one.facts["on a plain image"], one.facts["check"]) == (plain, check)


def test_a_model_that_needs_no_patch_has_a_blank_map_with_the_reason() -> None:
    model = Prior(DataInfo(image=(32, 32), channels=1, classes=3))
    shown = explain(model, torch.ones(1, 1, 32, 32), torch.ones(32, 32, 1), (), Subject("m", "i"), target=1)
    one = shown.maps["attribution"]
    assert not one.values_YX.any() and one.facts["on a plain image"].endswith(", most of it")


@pytest.mark.parametrize("model", [tiny(image=(8, 8)), ResNet8(DataInfo(image=(17, 17), channels=3, classes=4))])
def test_maps_of_few_patches_have_no_check(model: Any) -> None:
    """Of 4 patches, every fourth random choice would be the map's own; 17 pixels can only be cut into one square."""
    side = 8 if isinstance(model, ViT) else 17
    x = torch.randn(1, 3, side, side)
    facts = (
        explain(model, x, torch.rand(side, side, 3), (), Subject("m", "i"), head="trained").maps["attribution"].facts
    )
    assert facts["check"] == "none: too few patches" and not [fact for fact in facts if "random" in fact]


@pytest.mark.parametrize("head", ["trained", "multilabel"])
def test_logit_of_most_probable_class_is_attributed_unless_another_is_named(head: Any) -> None:
    model, x, image = tiny(), torch.randn(1, 3, 8, 12), torch.rand(8, 12, 3)

    def attributed(target: int | None) -> Map:
        names = ("a", "b", "c", "d")
        return explain(model, x, image, names, Subject("m", "i"), head=head, target=target).maps["attribution"]

    with torch.no_grad():
        best = int(model.eval()(x).logits.argmax())
    assert attributed(None).title == f"patches for (red) and against (blue) class {'abcd'[best]}"
    for target in (best, 3 - best):
        values = integrated_gradients(model, x, target, 32)[0]
        np.testing.assert_array_equal(attributed(target).values_YX, values)
    np.testing.assert_array_equal(attributed(None).values_YX, attributed(best).values_YX)
    untrained = explain(model, x, image, (), Subject("m", "i"), head="untrained")
    assert list(untrained.maps) == ["rollout_class"]


@pytest.mark.usefixtures("unpainted")
def test_common_scales_cover_all_maps_of_a_kind(tmp_path: Path) -> None:
    x, image = torch.randn(1, 3, 8, 12), torch.rand(8, 12, 3)
    all_of = [explain(tiny(position=each), x, image, (), Subject("m", "i")) for each in ("none", "learned")]
    scales = common_scales(all_of)
    drawn = [write_explanation(each, tmp_path / str(index), scales) for index, each in enumerate(all_of)]
    for name, low in (("rollout_class", 0), ("attribution", -1)):
        largest = [float(np.abs(each.maps[name].values_YX).max()) for each in all_of]
        assert largest[0] != largest[1]
        assert {each.maps[name].scale for each in drawn} == {Scale(low * max(largest), max(largest))}
        assert [each.maps[name].scale.high for each in all_of] == largest, "without common scales, each has its own"
    assert scales["heads"] == Scale(0, max(float(each.heads["class"].max()) for each in all_of))
    assert scales["norms"].high == max(norms.ratio for each in all_of for norms in each.norms)
    [top] = {pictures.draw_norm_ratios(np.array([1.0, ratio]), Scale(0, 3)).axes[0].get_ylim()[1] for ratio in (2, 3)}
    assert top >= 3, "figures of one scale have one axis"
    infinite = np.array([np.inf, 2.0, np.nan])  # more than half of the tokens of a black border are zero
    assert Scale.of("norms", [infinite]) == Scale(0, 2) and Scale.of("norms", [infinite[:1]]).high > 0
    assert pictures.draw_norm_ratios(infinite, Scale.of("norms", [infinite])).axes[0].get_ylim()[1] == pytest.approx(
        2.05
    )
    distances = [pictures.draw_distances(each.distance_LH, scales["distance"], uniform=1.0) for each in all_of]
    assert len({figure.axes[0].get_ylim() for figure in distances}) == 1


def test_map_without_a_large_value_is_noted_as_faint_on_a_common_scale() -> None:
    one = Map.of("rollout", "m", np.full((2, 2), 0.02), {"largest_share": 0.02, "mean_share": 0.02})
    assert one.facts == {"largest share": "2.0 %, 1.0 x the mean"}
    assert "colours" not in one._replace(scale=Scale(0.0, 0.079)).facts
    faint = one._replace(scale=Scale(0.0, 0.081)).facts
    assert faint["colours"] == "faint on the common scale; --scale own shows them"


@pytest.mark.parametrize(
    ("logit", "classes", "chance"),
    [(0.0, 10, 0.1), (0.68, 10, 0.1), (0.70, 10, None), (0.68, 2, 0.5), (0.70, 2, None), (0.70, 1000, None)],
)
def test_prediction_below_twice_the_odds_of_chance_is_noted(logit: float, classes: int, chance: float | None) -> None:
    """One logit above equal others multiplies the odds of its class by its exponential; 2 is exp(0.693)."""
    model = ViT(DataInfo(image=(8, 12), channels=3, classes=classes), dim=16, depth=1, heads=2, patch_size=4)
    with torch.no_grad():
        model.head.fc.weight.zero_()
        model.head.fc.bias.zero_()[1] = logit
    explanation = explain(model, torch.randn(1, 3, 8, 12), torch.rand(8, 12, 3), (), Subject("m", "i"))
    assert explanation.chance_if_close == chance
    assert ("chance is" in explanation.sentence) == (chance is not None)


@pytest.mark.parametrize(
    ("logits", "truth", "sentence", "is_right"),
    [
        ([2.0, 1.0, -3.0], "a, b", "predicts a, b", True),
        ([2.0, -1.0, -3.0], "a, b", "predicts a (88.1 %)", False),
        ([0.2, -3.0, -3.0], "a", "predicts a (55.0 %)", True),
        ([-0.1, -1.0, -3.0], "none", "predicts none", True),
        ([-0.1, -1.0, -3.0], None, "predicts none", None),
    ],
)
def test_answer_of_several_labels_has_all_from_a_probability_of_one_half(
    logits: list[float], truth: str | None, sentence: str, is_right: bool | None
) -> None:
    model = ViT(DataInfo(image=(8, 12), channels=3, classes=3), dim=16, depth=1, heads=2, patch_size=4)
    with torch.no_grad():
        model.head.fc.weight.zero_()
        model.head.fc.bias.copy_(torch.tensor(logits))
    x, image, subject = torch.randn(1, 3, 8, 12), torch.rand(8, 12, 3), Subject("m", "i", truth)
    explanation = explain(model, x, image, ("a", "b", "c"), subject, head="multilabel")
    assert (explanation.sentence, explanation.is_right) == (sentence, is_right)


# -- one image --------------------------------------------------------------------------------------------------------


def explained(model: ViT, out: Path, **how: Any) -> dict[str, pd.DataFrame]:
    generator = torch.Generator().manual_seed(5)
    height, width = model.geometry.image
    x = torch.randn(1, 3, height, width, generator=generator)
    image, subject = torch.rand(height, width, 3, generator=generator), Subject("model m", "image i", "b")
    files = write_explanation(explain(model, x, image, ("a", "b", "c", "d"), subject, **how), out).files
    assert all(file.stat().st_size > 0 for file in files)
    assert {file.stem for file in files if file.suffix == ".png"} >= {"distance", "norms"}
    return {file.stem: pd.read_csv(file) for file in files if file.suffix == ".csv"}


@pytest.mark.usefixtures("unpainted")
def test_numbers_behind_pictures_equal_model(tmp_path: Path) -> None:
    model = tiny(attention="sdpa")
    tables = explained(model, tmp_path)
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(1, 3, 8, 12, generator=generator)
    with torch.no_grad():
        share = model.eval()(x).logits[0].double().softmax(0).numpy()
    assert tables["predictions"]["label"].tolist() == [("a", "b", "c", "d")[index] for index in np.argsort(-share)]
    np.testing.assert_allclose(tables["predictions"]["probability"], np.sort(share)[::-1], rtol=1e-6)
    assert tables["predictions"].query("true")["label"].tolist() == ["b"]
    heat = attention_to_patch_maps(rollout(capture(model, x).maps_LBHTT), model.geometry, ("class",))["class"][0]
    np.testing.assert_allclose(tables["rollout_class"], heat.numpy(), rtol=1e-9)
    distances = [attention_distance(maps, model.geometry)[0] for maps in capture(model, x).maps_LBHTT]
    np.testing.assert_allclose(tables["distance"]["distance_px"], torch.cat(distances).numpy(), rtol=1e-9)


@pytest.mark.usefixtures("unpainted")
@pytest.mark.parametrize("head", ["segmentation", {"type": "linear", "pool": "gap"}, {"type": "mlp", "pool": "map"}])
def test_patch_head_is_explained_by_patches(head: Any, tmp_path: Path) -> None:
    """The class token exists but does not affect the prediction."""
    task = "segmentation" if head == "segmentation" else "classification"
    tables = explained(tiny(task, head=head), tmp_path)
    assert "rollout_mean" in tables and "rollout_class" not in tables
    assert tables["predictions"]["probability"].sum() == pytest.approx(1)
    assert sorted(tables["predictions"]["class"]) == [0, 1, 2, 3]


@pytest.mark.usefixtures("unpainted")
@pytest.mark.parametrize("position", ["learned2d", "sinusoidal", "fourier"])
def test_every_additive_encoding_has_grids(position: str, tmp_path: Path) -> None:
    model = tiny(position=position)
    table = explained(model, tmp_path)["positions"].to_numpy()
    zeros = torch.zeros(1, model.geometry.tokens, 16)
    with torch.no_grad():
        rows = model.position.add(zeros, 0)[0, 1:].double().numpy()
    expected = rows @ rows.T / np.outer(*[np.linalg.norm(rows, axis=1)] * 2)
    np.testing.assert_allclose(table, expected, atol=1e-9)


@pytest.mark.usefixtures("unpainted")
def test_large_grid_draws_every_second_position(tmp_path: Path) -> None:
    tables = explained(tiny(image=(80, 8)), tmp_path)
    assert tables["positions"].shape == (10 * 1, 20 * 2)


def test_axis_labels_stay_inside_picture() -> None:
    figure = pictures.draw_norm_ratios(np.ones(3), Scale(0, 1))
    figure.draw_without_rendering()
    for label in (figure.axes[0].yaxis.label, figure.axes[0].xaxis.label):
        box = label.get_window_extent()
        assert figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1 and figure.bbox.x0 <= box.x0


def test_every_picture_names_model_image_and_true_label(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    captions: list[str] = []
    monkeypatch.setattr("vitlab.explaining.pictures.add_caption", lambda figure, text: captions.append(text))
    files = list(explained(tiny(), tmp_path))
    assert files and set(captions) == {"model m; image i (true label: b)"}
    assert len(captions) == len(list(tmp_path.glob("*.png")))


@pytest.mark.slow
def test_side_by_side_draws_each_model_for_shared_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, image = torch.randn(1, 3, 8, 12), torch.rand(8, 12, 3)
    heads = {"by class": "linear", "by class, too": "linear", "by patches": {"type": "linear", "pool": "gap"}}
    explanations = {
        name: explain(tiny(head=head), x, image, ("a", "b", "c", "d"), Subject(name, "image i"))
        for name, head in heads.items()
    }
    captions: list[str] = []
    monkeypatch.setattr("vitlab.explaining.pictures.add_caption", lambda figure, text: captions.append(text))
    files = write_side_by_side(explanations, "study s", tmp_path)
    assert {file.name for file in files} == {"rollout_class.png", "rollout_mean.png", "attribution.png", "maps.csv"}
    numbers = pd.read_csv(tmp_path / "maps.csv").set_index(["model", "map"])
    assert len(numbers) == 6 and not numbers.loc["by class"].loc["attribution", "largest_share"] > 0
    for name, each in explanations.items():
        for key, one in each.maps.items():
            stored, expected = numbers.loc[(name, key)].dropna().to_dict(), dict(one.numbers)
            assert stored.pop("class") == expected.pop("class") and stored == pytest.approx(expected)
    assert all(file.stat().st_size for file in files)
    assert captions == ["study s; image i"] * 3


@pytest.mark.slow
def test_segmentation_is_drawn_beside_its_true_labels(tmp_path: Path) -> None:
    """Every second pixel of the picture is right, and those without a label do not count."""
    explanations = {}
    x, image = torch.randn(1, 3, 8, 12), torch.rand(8, 12, 3)
    for name in ("one", "two"):
        model = tiny("segmentation", head="segmentation")
        with torch.no_grad():
            expected_HW = model.logits_by_head(model.eval()(x))[""][0].argmax(0).numpy()
        label_HW = expected_HW.copy()
        label_HW[:, ::2] = (label_HW[:, ::2] + 1) % 4
        label_HW[:4] = IGNORED
        subject = Subject(name, "image i", None, label_HW)
        explanations[name] = write_explanation(explain(model, x, image, ("a", "b", "c", "d"), subject), tmp_path / name)
        np.testing.assert_array_equal(pd.read_csv(tmp_path / name / "labels.csv"), expected_HW)
        assert str(subject) == f"{name}; image i"
    files = {file.name for file in write_side_by_side(explanations, "s", tmp_path)}
    assert files == {"attribution.png", "rollout_mean.png", "labels.png", "maps.csv"}
    figure = pictures.draw_label_maps(
        image.numpy(), {"two": expected_HW}, labels=("a", "b", "c", "d"), truth_HW=label_HW
    )
    assert [axis.get_title() for axis in figure.axes] == ["image", "true labels", "two"]
    assert [axis.get_xlabel() for axis in figure.axes] == ["", "", "50.0\N{NO-BREAK SPACE}% of the pixels right"]
    void = pictures.draw_label_maps(
        image.numpy(), {"two": expected_HW}, labels=tuple("abcd"), truth_HW=np.full((8, 12), IGNORED)
    )
    assert void.axes[2].get_xlabel() == "", "no pixel has a label"
    white = figure.axes[1].images[0].get_array()[: 4 * 30]  # 360 pixels for 12
    assert (white == 255).all()


# -- as artifacts of a trial ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_report")
def test_unfinished_trial_of_arm_is_named(tmp_path: Path) -> None:
    from vitlab.driver.explanations import write_arm_explanations
    from vitlab.store.folders import Store
    from vitlab.store.result import Circumstances, Outcome, TrialResult

    store = Store(tmp_path)
    folder = store.trial("k", "c")
    outcome = Outcome({"val/accuracy": 0.5}, (), "", 1, 8)
    circumstances = Circumstances(1.0, 1.0, "here", 1, 1, 1, 1, {}, {}, 2.0)
    folder.write_result(TrialResult("k", "c", "done", outcome, circumstances))
    trial = SimpleNamespace(key="k", code="c", seeds={"init": 0})
    arms = {"plain": SimpleNamespace(trial=trial), "lost": SimpleNamespace(trial=SimpleNamespace(key="l", code="c"))}
    plan: Any = SimpleNamespace(study="some", first_trials=arms)
    sentences: list[str] = []
    with folder.lease():
        write_arm_explanations(plan, store, [0], sentences.append)
    [sentence] = sentences
    assert sentence.startswith("plain is not explained: another process is writing its trial")
    assert json.loads(reasons_file(plan, store).read_text()) == {
        "plain": "another process is writing its trial; run again to explain it",
        "lost": "the trial of its first seed is missing",
    }
    folder.write_result(TrialResult("k", "c", "diverged", replace(outcome, metrics={}), circumstances, "no number"))
    write_arm_explanations(plan, store, [0], sentences.append)
    assert sentences[-1] == "plain is not explained: it diverged: no number"


def test_failed_explanation_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitlab.driver import explanations
    from vitlab.models.trained import InputSpec
    from vitlab.store.folders import Store, write_json
    from vitlab.training.artifacts import Transform

    info = DataInfo(image=(8, 8), channels=1, classes=2)
    loaded = ViT(info, patch_size=4, dim=8, depth=1, heads=2), Transform(InputSpec(info, (0.5,), (0.5,)))
    example = torch.zeros(1, 8, 8, dtype=torch.uint8), Subject("m", "i")

    def fail(*arguments: Any, **options: Any) -> None:
        folder = arguments[1]
        folder.mkdir()
        (folder / "half.png").touch()
        raise OSError("No space")

    monkeypatch.setattr(explanations, "load_model", lambda folder: loaded)
    monkeypatch.setattr(explanations, "load_split_image", lambda *_: example)
    monkeypatch.setattr(one_image, "explain", lambda *arguments, **options: None)
    monkeypatch.setattr(explanations, "write_explanation", fail)
    folder = Store(tmp_path).trial("k", "c")
    write_json(folder.spec, {"seeds": {"init": 0}, "spec": {"train": {"objective": "supervised"}}})
    folder.weights_file.touch()
    with pytest.raises(OSError, match="No space"):
        explanations.write_explanations_to_trial(folder, 0, [0])
    assert {path.name for path in folder.path.iterdir()} == {folder.spec.name, folder.weights_file.name}


@pytest.mark.slow
@pytest.mark.usefixtures("no_report", "unpainted")
def test_study_explains_first_seed_of_every_supported_arm(tmp_path: Path) -> None:
    study = {
        "study": "explained",
        "base": {
            "data": {"type": "digits"},
            "model": {"type": "vit", "patch_size": 4, "dim": 8, "depth": 1, "heads": 2},
            "train": {"steps": 2, "batch_size": 8},
        },
        "design": {"one_at_a_time": {"model": ["resnet8"]}},
        "seeds": 2,
        "run": {"executor": "inline", "tracker": "none"},
    }
    file = tmp_path / "study.yaml"
    file.write_text(yaml.safe_dump(study, sort_keys=False))
    notes: list[str] = []

    class Ear(Watch):
        def say(self, sentence: str) -> None:
            notes.append(sentence)

    vitlab.run(file, out=tmp_path / "out")
    answer = vitlab.run(file, out=tmp_path / "out", changes={"run.explain": [3, 359]}, watch=Ear())
    assert (answer.trained, answer.cached) == (0, 4), "to explain is not to train"
    trial = answer.plan.find("baseline", 0).trial
    folder = answer.store.trial(trial.key, trial.code)
    assert {path.name for path in (folder.path / "explain").iterdir()} == {"test-3", "test-359"}
    assert (folder.path / "explain" / "test-3" / "rollout_class.png").exists()
    other = answer.plan.find("baseline", 1).trial
    assert not (answer.store.trial(other.key, other.code).path / "explain").exists()
    other = answer.plan.find("model=resnet8", 0).trial
    names = {path.name for path in (answer.store.folder(other).path / "explain" / "test-3").iterdir()}
    assert names == {"attribution.png", "attribution.csv", "maps.csv", "predictions.csv"}

    before = (folder.path / "explain" / "test-3").stat().st_mtime_ns
    vitlab.run(file, out=tmp_path / "out", changes={"run.explain": [3, 400]}, watch=Ear())
    assert (folder.path / "explain" / "test-3").stat().st_mtime_ns == before
    assert any("no test image 400: the split has 360" in sentence for sentence in notes)
    reasons = json.loads(reasons_file(answer.plan, answer.store).read_text())
    assert reasons["baseline"] == "there is no test image 400: the split has 360, with ids 0, 1, 2, 3, 4 and 355 more"
    vitlab.run(file, out=tmp_path / "out", changes={"run.explain": [3]})
    assert json.loads(reasons_file(answer.plan, answer.store).read_text()) == {}
    vitlab.run(file, out=tmp_path / "out")
    assert not reasons_file(answer.plan, answer.store).exists(), "this run explains nothing"
    with pytest.raises(SpecError, match="needs stored weights"):
        vitlab.run(file, out=tmp_path / "out", changes={"run.explain": [3], "run.keep": "none"})


@pytest.mark.usefixtures("no_report", "unpainted")
def test_trial_without_labels_is_explained_without_predictions(tmp_path: Path) -> None:
    file = tmp_path / "study.yaml"
    study = {
        "study": "unlabelled",
        "base": {
            "data": {"type": "digits"},
            "model": {"type": "vit", "patch_size": 4, "dim": 8, "depth": 1, "heads": 2},
            "train": {"steps": 2, "batch_size": 8, "objective": {"type": "mae", "dim": 8, "heads": 2}},
        },
        "analysis": {"metric": "val/loss"},
        "run": {"executor": "inline", "tracker": "none", "explain": [3]},
    }
    file.write_text(yaml.safe_dump(study))

    answer = vitlab.run(file, out=tmp_path / "out")
    trial = answer.plan.trials[0].trial
    place = answer.store.trial(trial.key, trial.code).path / "explain" / "test-3"
    names = {path.name for path in place.iterdir()}
    assert {"rollout_class.png", "distance.png"} <= names and "predictions.csv" not in names


@pytest.mark.parametrize(("truth", "expected"), [("crane", True), ("heron", False)])
def test_one_of_two_classes_with_one_name_is_right(truth: str, expected: bool) -> None:
    """ImageNet has a crane that flies and one that lifts."""
    table = one_image._prediction_table(torch.tensor([0.1, 0.3, 0.6]), ("crane", "heron", "crane"), truth, "trained")
    assert (table["true"] == table["predicted"]) is expected
