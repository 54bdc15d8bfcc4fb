"""Tests of position encodings that stand together: against timm, numpy in float64, and each encoding alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor

from vitlab.cli.show import study_schema
from vitlab.components.position import encodings_by_prefix, position
from vitlab.data.torchvision_import import torchvision
from vitlab.engines.batch_last import model_incompatibility
from vitlab.errors import OptionError, SpecError
from vitlab.geometry import DataInfo, Geometry
from vitlab.lab import plan_study
from vitlab.models import ViT, model
from vitlab.planning.values import Plan
from vitlab.registry import slot
from vitlab.spec.trial import InitFrom
from vitlab.testing import check_component
from vitlab.weights.transfer import load_and_freeze_weights

torchvision()  # timm imports torchvision, whose import may need a workaround
timm = pytest.importorskip("timm")
from timm.models.eva import Eva  # noqa: E402

DATA = DataInfo(image=(16, 24), channels=3, classes=5)
SMALL = {"type": "vit", "dim": 16, "depth": 2, "heads": 2, "patch_size": 8}
FOUR = ["learned", "relative_bias", "rope2d", "conditional"]


def built(seed: int = 0, data: DataInfo = DATA, **options: Any) -> ViT:
    vit = model.build({**SMALL, **options}, data)
    assert isinstance(vit, ViT)
    vit.initialise(seed)
    return vit


def eva(**options: Any) -> Any:
    """Return timm's model with a learned table and a rotation, and parameters that are not zero or one."""
    sizes = {"patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 5, "global_pool": "token"}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        theirs = Eva(DATA.image, **sizes, use_rot_pos_emb=True, attn_type="rope", **options)
        with torch.no_grad():
            for parameter in theirs.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape))
    return theirs.double().eval()


def logits(of: Any, x: Tensor) -> Tensor:
    out = of(x)
    return of.logits_by_head(out)[""] if isinstance(of, ViT) else out


@pytest.mark.parametrize("rows", ["own", "none"])
def test_learned_and_rope_equal_timm_with_gradients(rows: str) -> None:
    theirs = eva(rope_temperature=100.0, rope_grid_indexing="xy", no_embed_class=rows == "none")
    parts = [{"type": "learned", "prefix_rows": rows}, {"type": "rope2d", "theta": 100.0}]
    ours = built(position=parts).double().eval()
    ours.load_state_dict(ours.from_canonical(theirs.state_dict()))
    sin, cos = (half[:, ::2] for half in theirs.rope.get_embed().chunk(2, -1))
    rotary = encodings_by_prefix(ours.position)["parts.1."]
    for name, theirs_NK in (("cos", cos), ("sin", sin)):
        own_TK = rotary.get_buffer(name)
        torch.testing.assert_close(own_TK[1:], theirs_NK, atol=1e-6, rtol=0)
        own_TK[1:] = theirs_NK  # timm computes angles in float32
    x = torch.randn(3, 3, *DATA.image, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for each in (ours, theirs):
        logits(each, x).sin().sum().backward()
    torch.testing.assert_close(logits(ours, x), logits(theirs, x), atol=1e-10, rtol=0)
    gradients = ours.to_canonical({name: parameter.grad for name, parameter in ours.named_parameters()})  # type: ignore[misc]
    expected = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    assert gradients.keys() == expected.keys() and "pos_embed" in gradients
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, atol=1e-10, rtol=0)


def test_learned_and_mixed_rope_equal_timm() -> None:
    theirs = eva(rope_type="mixed", rope_temperature=10.0, rope_grid_indexing="xy").float()
    ours = built(position=["learned", "rope2d_mixed"]).eval()
    state = theirs.state_dict()
    state["position.freqs"] = state.pop("rope.freqs")
    ours.load_state_dict(ours.from_canonical(state))
    x = torch.randn(3, 3, *DATA.image, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(logits(ours, x), logits(theirs, x), atol=1e-5, rtol=0)


def test_biases_are_summed() -> None:
    """Against the formulas of both in float64: a table by offset, and a fixed slope times the distance."""
    g = Geometry(image=(2, 3), channels=1, patch=(1, 1), prefix=("class",), dim=8, depth=2, heads=2, classes=2)
    module = position.build(["relative_bias", "alibi2d"], g).double()
    table = module.state_dict()["parts.0.relative_position_bias_table"].numpy()
    expected = np.zeros((2, g.tokens, g.tokens))
    for query in range(g.tokens):
        for key in range(g.tokens):
            if query == 0 or key == 0:
                row = 15 + (2 if query == key else 0 if query == 0 else 1)
                expected[:, query, key] = table[1, row]
                continue
            (y, x), (v, u) = divmod(query - 1, 3), divmod(key - 1, 3)
            slopes = np.array([2.0**-4, 2.0**-8])
            expected[:, query, key] = table[1, (y - v + 1) * 5 + x - u + 2] - slopes * np.hypot(y - v, x - u)
    bias = module.bias(2)
    assert bias is not None
    np.testing.assert_allclose(bias.detach().numpy(), expected, rtol=0, atol=1e-7)  # alibi2d is stored in float32


def test_hooks_compose_in_order() -> None:
    ours = built(position=FOUR).position
    alone = list(encodings_by_prefix(ours).values())
    assert [type(part).__name__ for part in alone] == ["Learned", "RelativeBias", "RoPE2D", "Conditional"]
    x = torch.randn(2, 7, 16)
    assert torch.equal(ours.add(x, 0), alone[0].add(x, 0))
    assert ours.bias(1) is not None and torch.equal(ours.bias(1), alone[1].bias(1))  # type: ignore[arg-type]
    assert ours.rotation(2) == alone[2].rotation(2)
    assert torch.equal(ours.mix(x, 1), alone[3].mix(x, 1))
    summed = position.build(["learned", "learned2d"], built().geometry)
    first, second = encodings_by_prefix(summed).values()
    assert torch.equal(summed.add(x, 0), second.add(first.add(x, 0), 0))


@pytest.mark.parametrize("name", ["learned", "learned2d", "fourier", "relative_bias", "rope2d_mixed", "conditional"])
def test_part_has_names_and_draws_of_itself_alone(name: str) -> None:
    other = "alibi2d" if name == "learned" else "learned"
    alone, together = built(3, position=name), built(3, position=[other, name])
    expected, state = (each.to_canonical(each.state_dict()) for each in (alone, together))
    assert expected.keys() <= state.keys()
    assert all(torch.equal(state[key], value) for key, value in expected.items())
    exempt, own = (
        {key for name in each.no_weight_decay() for key in each.to_canonical({name: torch.zeros(1)})}
        for each in (alone, together)
    )
    assert exempt <= own
    names = [key for key in together.state_dict() if key.startswith("position.")]
    assert names and {together.layer_of(key) for key in names} == {0}


def test_rows_are_resampled_and_taken_from_learned_alone() -> None:
    small, large = built(1), built(2, DataInfo(image=(32, 48), channels=3, classes=5), position=["learned", "rope2d"])
    notes = load_and_freeze_weights(large, small, InitFrom(checkpoint="x"))
    assert any("position is learned+rope2d" in note for note in notes)
    reference = built(2, DataInfo(image=(32, 48), channels=3, classes=5))
    load_and_freeze_weights(reference, small, InitFrom(checkpoint="x"))
    rows = large.to_canonical(large.state_dict())["pos_embed"]
    assert rows.shape == (1, 25, 16) and torch.equal(rows, reference.to_canonical(reference.state_dict())["pos_embed"])


@pytest.mark.parametrize("attention", slot("attention").names())
def test_every_attention_takes_four_encodings_or_is_refused(attention: str) -> None:
    x = torch.randn(2, 3, *DATA.image, generator=torch.Generator().manual_seed(1))
    try:
        ours = built(position=FOUR, attention=attention)
    except OptionError as error:
        assert "change one of the two" in str(error)
        return
    out = logits(ours, x)
    out.square().sum().backward()
    assert all(parameter.grad is not None for parameter in ours.position.parameters())
    assert out.isfinite().all()


@pytest.mark.parametrize("parts", [["learned", "rope2d"], ["sincos2d", "alibi2d"], ["fourier", "conditional"]])
def test_contract_holds(parts: list[str]) -> None:
    check_component("position", {"type": "together", "parts": parts})


@pytest.mark.parametrize("parts", [["learned", "sincos2d", "conditional"], ["learned", "rope2d", "alibi2d"]])
def test_batch_last_supports_encodings_together(parts: list[str]) -> None:
    assert model_incompatibility(built(position=parts), "fp32", torch.device("cpu")) is None
    options = {name: value for name, value in SMALL.items() if name != "type"}
    work = ViT.work(DATA, {**options, "position": parts})
    assert work is not None and work.products is not None


# -- in a study -------------------------------------------------------------------------------------------------------

BASE: dict[str, Any] = {
    "data": {"type": "digits"},
    "model": {"type": "vit", "patch_size": 2, "dim": 8, "depth": 2, "heads": 2, "position": ["learned", "rope2d"]},
    "train": {"steps": 2, "batch_size": 8},
}


def plan(tmp_path: Path, text: str = "", **study: Any) -> Plan:
    file = tmp_path / "study.yaml"
    file.write_text(text or yaml.safe_dump({"study": "s", "base": BASE, **study}, sort_keys=False))
    return plan_study(file)[1]


def test_arms_are_named_by_their_parts(tmp_path: Path) -> None:
    values = ["learned", ["learned", {"type": "rope2d", "theta": 50.0}]]
    planned = plan(tmp_path, design={"one_at_a_time": {"model.position": values, "model.position.1.theta": [10.0]}})
    expected = ["baseline", "position=learned", "position=learned+rope2d(theta=50)", "theta=10"]
    assert [arm.name for arm in planned.arms] == expected
    thetas = [
        each.trial.spec.model.options["position"]["parts"][1]["theta"] for each in planned.trials if "theta" in each.arm
    ]
    assert thetas == [50.0] * 3 + [10.0] * 3
    assert Plan.from_json(planned.to_json()) == planned


def test_list_of_one_is_the_component_itself(tmp_path: Path) -> None:
    planned = plan(tmp_path, design={"one_at_a_time": {"model.position": ["learned", ["learned"]]}})
    assert [arm.name for arm in planned.arms] == ["baseline", "position=learned"]
    assert planned.arms[1].aliases == ("position=[learned]",)


def test_rule_names_parts(tmp_path: Path) -> None:
    rule = {"require": "model.position != 'learned+rope2d'", "because": "no rotation"}
    planned = plan(
        tmp_path,
        design={"arms": {"a": {"model.position": "learned"}, "b": {}}},
        where=[rule],
        analysis={"compare": "none"},
    )
    assert [arm.skip for arm in planned.arms] == ["", "no rotation"]


@pytest.mark.parametrize(
    ("position", "line", "sentence"),
    [
        ("[learned, {type: rope2d, theta: -1}]", 6, "position 'rope2d': theta must be greater than 0; found -1"),
        ("[learned, rope2dd]", 6, "no position called 'rope2dd'. Did you mean 'rope2d'?"),
        ("[]", 6, "parts must have at least 1 value"),
        ("[learned, 3]", 6, "a component is a name"),
    ],
)
def test_mistake_in_list_has_place(position: str, line: int, sentence: str, tmp_path: Path) -> None:
    text = f"study: s\nbase:\n  data: digits\n  model:\n    dim: 8\n    position: {position}\n    type: vit\n"
    with pytest.raises(SpecError) as caught:
        plan(tmp_path, text + "  train: {steps: 1}\n")
    problem = next(each for each in caught.value.problems if sentence in each.message)
    assert problem.line == line


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        (["rope2d", "rope2d_mixed"], "positions 'rope2d' and 'rope2d_mixed' each rotate queries and keys"),
    ],
)
def test_impossible_list_is_refused(parts: list[str], sentence: str, tmp_path: Path) -> None:
    planned = plan(tmp_path, design={"one_at_a_time": {"model.position": [parts]}})
    assert sentence in planned.arms[1].skip
    with pytest.raises(OptionError, match=sentence):
        built(position=parts)


@pytest.mark.parametrize("parts", [["learned", "learned"], ["none", "none"], [["none", "learned"], "none"]])
def test_repetition_in_a_list_is_a_mistake(parts: list[Any], tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="is in the list twice; remove one"):
        plan(tmp_path, design={"one_at_a_time": {"model.position": [parts]}})


def test_list_in_other_slots_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="one norm belongs here, found a list of 2"):
        built(norm=["layernorm", "rmsnorm"])
    base = {**BASE, "train": {"steps": 2, "optimizer": ["adamw", "sgd"]}}
    with pytest.raises(SpecError, match="one optimizer belongs here, found a list of 2"):
        plan(tmp_path, yaml.safe_dump({"study": "s", "base": base}))


def test_schema_accepts_lists_of_positions() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    check = jsonschema.Draft202012Validator(study_schema())
    assert check.is_valid({"study": "s", "base": BASE})
    for wrong in (["learned", "leraned"], [{"type": "rope2d", "thet": 3}]):
        assert not check.is_valid({"study": "s", "base": {**BASE, "model": {**BASE["model"], "position": wrong}}})
