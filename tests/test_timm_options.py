"""Tests of the page that says timm's and ViT-5's options in YAML: every argument has a row, and every row is true."""

from __future__ import annotations

import ast
import inspect
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from test_timm_parity import TOLERANCE, PreciseDiffAttention, unpacked
from torch import Tensor, nn

from vitlab.data.torchvision_import import torchvision
from vitlab.geometry import DataInfo
from vitlab.models import ViT, model

torchvision()  # timm imports torchvision, whose import may need a workaround
timm = pytest.importorskip("timm")
from timm.models import vision_transformer as timm_vit  # noqa: E402

PAGE = (Path(__file__).parents[1] / "docs" / "pages" / "timm.md").read_text()
DATA = DataInfo(image=(16, 24), channels=3, classes=5)
SMALL = {"dim": 24, "depth": 2, "heads": 3, "patch_size": 8}
THEIRS = {"img_size": (16, 24), "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}
CLASSES = {"DiffAttention": PreciseDiffAttention}
"""Classes of timm that compute a part in float32, as ones that do not."""

NOT_BUILT = ("refused", "of no effect", "the size of", "the channels of", "the classes of")


def rows(columns: int) -> list[list[str]]:
    """Return the cells of the page's table of so many columns, without its head."""
    lines = [line for line in PAGE.splitlines() if line.startswith("| ")]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [cells for cells in table if len(cells) == columns and "---" not in cells[0]][1:]


def quoted(cell: str) -> str:
    """Return the code in a cell that consists of code alone."""
    match = re.fullmatch(r"`([^`]+)`", cell)
    assert match, cell
    return match[1]


def arguments(cell: str) -> dict[str, Any]:
    """Return keyword arguments of timm; a name is one of timm's classes."""
    call = ast.parse(f"f({quoted(cell)})", mode="eval").body
    assert isinstance(call, ast.Call)
    return {
        str(keyword.arg): CLASSES.get(keyword.value.id) or getattr(timm_vit, keyword.value.id)
        if isinstance(keyword.value, ast.Name)
        else ast.literal_eval(keyword.value)
        for keyword in call.keywords
    }


def options(cell: str) -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load("{" + quoted(cell) + "}")
    return read


ROWS = rows(3)
BUILT = [(theirs, ours) for theirs, ours, _ in ROWS if ours.startswith("`")]


def test_every_argument_has_a_row() -> None:
    said = {name for theirs, _, _ in ROWS for name in arguments(theirs)}
    first = {next(iter(arguments(theirs))) for theirs, _, _ in ROWS}
    parameters = set(inspect.signature(timm_vit.VisionTransformer.__init__).parameters) - {"self"}
    assert said <= parameters and first == parameters
    assert f"timm {timm.__version__}" in PAGE
    for theirs, ours, remark in ROWS:
        assert ours.startswith(("`", *NOT_BUILT)), theirs
        assert ours != "refused" or remark, f"{theirs}: a refusal has a reason"


def built(ours: dict[str, Any]) -> ViT:
    vit = model.build({"type": "vit", **SMALL, **ours}, DATA)
    assert isinstance(vit, ViT)
    return vit


def randomised(of: nn.Module) -> nn.Module:
    """Set every parameter to random values, because zeros and ones hide errors."""
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in of.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=g) * 0.2)
    return of.double().eval()


X = torch.randn(2, 3, *DATA.image, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def gradients(of: nn.Module, logits: Tensor) -> dict[str, Tensor]:
    nn.functional.cross_entropy(logits, torch.tensor([1, 4])).backward()
    return {name: p.grad for name, p in of.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("theirs", "ours"), BUILT, ids=lambda cell: cell.strip("`"))
def test_row_equals_timm(theirs: str, ours: str, dtype: torch.dtype) -> None:
    x_BCHW, atol = X.to(dtype), TOLERANCE[dtype]
    close = partial(torch.testing.assert_close, atol=atol, rtol=0 if dtype == torch.float64 else atol)
    with torch.random.fork_rng(devices=[]):
        reference = randomised(timm_vit.VisionTransformer(**{**THEIRS, **arguments(theirs)})).to(dtype)
    convert = unpacked if "ParallelScalingBlock" in theirs else dict
    mine = built(options(ours)).to(dtype).eval()
    mine.load_state_dict(mine.from_canonical(convert(reference.state_dict())))
    logits, expected = mine.logits_by_head(mine(x_BCHW))[""], reference(x_BCHW)
    close(logits, expected)
    actual = mine.to_canonical(gradients(mine, logits))
    expected_gradients = convert(gradients(reference, expected))
    assert actual.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        close(actual[name], gradient, msg=lambda m, n=name: f"{n}: {m}")


# -- ViT-5 ------------------------------------------------------------------------------------------------------------


def vit5_logits(state: dict[str, Tensor], x_BCHW: Tensor, heads: int) -> Tensor:
    """Compute ViT-5 as its authors' code does (models_vit5.py, rope.py), from canonical weights, in float64.

    Tokens are class, patches, registers; a learned row for each patch; the first half of the pairs turns with the row.
    """

    def rms(x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * state[f"{name}.weight"]

    def linear(x: Tensor, name: str) -> Tensor:
        return nn.functional.linear(x, state[f"{name}.weight"], state.get(f"{name}.bias"))

    def turned(x_BHNK: Tensor, side: tuple[int, int], theta: float) -> Tensor:
        half = x_BHNK.shape[-1] // 2
        freqs = theta ** (-torch.arange(0, half, 2, dtype=torch.float64) / half)
        angles = [torch.arange(n, dtype=torch.float64)[:, None] * freqs for n in side]
        rows, columns = angles[0][:, None].expand(*side, -1), angles[1][None].expand(*side, -1)
        angle = torch.cat([rows, columns], -1).flatten(0, 1).repeat_interleave(2, -1)
        swapped = torch.stack([-x_BHNK[..., 1::2], x_BHNK[..., ::2]], -1).flatten(-2)
        return x_BHNK * angle.cos() + swapped * angle.sin()

    kernel = state["patch_embed.proj.weight"]
    x_BDRC = nn.functional.conv2d(x_BCHW, kernel, state["patch_embed.proj.bias"], stride=kernel.shape[-2:])
    grid = (x_BDRC.shape[2], x_BDRC.shape[3])
    x = x_BDRC.flatten(2).transpose(1, 2) + state["pos_embed"]
    registers = state["reg_token"].shape[1]
    batch = len(x)
    x = torch.cat([state["cls_token"].expand(batch, -1, -1), x, state["reg_token"].expand(batch, -1, -1)], 1)
    last = x.shape[1] - registers
    for i in range(len([name for name in state if name.endswith("norm1.weight")])):
        at = f"blocks.{i}"
        qkv = linear(rms(x, f"{at}.norm1"), f"{at}.attn.qkv").unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        pairs = qkv.shape[-1] // 4
        rows_first = torch.arange(qkv.shape[-1]).roll(2 * pairs)  # our rotation has the columns first
        sides = []
        for x_BHTK, norm in ((qkv[0], "q_norm"), (qkv[1], "k_norm")):
            y = rms(x_BHTK, f"{at}.attn.{norm}")[..., rows_first]
            side = int(registers**0.5)
            parts = [y[:, :, :1], turned(y[:, :, 1:last], grid, 1e4), turned(y[:, :, last:], (side, side), 100.0)]
            sides.append(torch.cat(parts, 2))
        weights = (sides[0] * sides[0].shape[-1] ** -0.5 @ sides[1].transpose(-2, -1)).softmax(-1)
        y = linear((weights @ qkv[2]).transpose(1, 2).flatten(2), f"{at}.attn.proj")
        x = x + state[f"{at}.ls1.gamma"] * y
        hidden = nn.functional.gelu(linear(rms(x, f"{at}.norm2"), f"{at}.mlp.fc1"))
        x = x + state[f"{at}.ls2.gamma"] * linear(hidden, f"{at}.mlp.fc2")
    return linear(rms(x, "norm")[:, 0], "head")


def test_vit5_equals_its_code() -> None:
    text = PAGE.partition("```text")[2].partition("\n")[2].partition("```")[0]
    read: dict[str, Any] = yaml.safe_load(text)["base"]["model"]
    whole = {name: value for name, value in read.items() if name not in ("type", "size")}
    for _, cell in rows(2):
        for name, value in options(cell).items():
            if name == "attention":
                assert value.items() <= whole[name].items()
            elif name == "position":
                parts = value if isinstance(value, list) else [value]
                assert all(any(part.items() <= other.items() for other in whole[name]) for part in parts)
            else:
                assert whole[name] == value
    torch.set_default_dtype(torch.float64)  # of the tables of rotations
    try:
        mine = built({**whole, "dim": 24, "heads": 3})
    finally:
        torch.set_default_dtype(torch.float32)
    randomised(mine)
    logits = mine.logits_by_head(mine(X))[""]
    state = {name: value.detach().requires_grad_() for name, value in mine.to_canonical(mine.state_dict()).items()}
    expected = vit5_logits(state, X, heads=3)
    torch.testing.assert_close(logits, expected, atol=1e-10, rtol=0)
    actual = mine.to_canonical(gradients(mine, logits))
    nn.functional.cross_entropy(expected, torch.tensor([1, 4])).backward()
    for name, value in state.items():
        torch.testing.assert_close(actual[name], value.grad, atol=1e-10, rtol=0)
