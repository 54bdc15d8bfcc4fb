"""Tests of the Vision Transformer against timm: weights through the canonical form in both directions, equal logits."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

import pytest
import slot_fixtures
import torch
from torch import Tensor, nn

from vitlab import noise
from vitlab.data.torchvision_import import torchvision
from vitlab.errors import GeometryError, OptionError
from vitlab.geometry import DataInfo
from vitlab.models import Model, ViT, model
from vitlab.models.vit_parts import SIZES, SizeName
from vitlab.registry import slot

torchvision()  # timm imports torchvision, whose import may need a workaround
timm = pytest.importorskip("timm")
from timm.models.deit import VisionTransformerDistilled  # noqa: E402
from timm.models.eva import Eva  # noqa: E402
from timm.models.vision_transformer import VisionTransformer  # noqa: E402
from timm.optim import param_groups_weight_decay  # noqa: E402

DATA = DataInfo(image=(32, 48), channels=3, classes=7)
SMALL = {"dim": 48, "depth": 2, "heads": 3, "patch_size": 8}
THEIRS = {"patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 7}


@dataclass(frozen=True)
class Pair:
    """One model in our options and in timm's."""

    name: str
    ours: Mapping[str, Any]
    theirs: Mapping[str, Any]
    build: type[nn.Module] = VisionTransformer

    def __str__(self) -> str:
        return self.name


NO_EMBED_CLASS = {"type": "learned", "prefix_rows": "none"}
PAIRS = [
    Pair("class token", {}, {}),
    Pair("mean", {"head": {"type": "linear", "pool": "gap"}, "final_norm_at": "pooled"}, {"global_pool": "avg"}),
    Pair(
        "mean of normed tokens",
        {"head": {"type": "linear", "pool": "gap"}},
        {"global_pool": "avg", "fc_norm": False},
    ),
    Pair(
        "mean without class token",
        {"prefix": [], "head": {"type": "linear", "pool": "gap"}, "final_norm_at": "pooled"},
        {"class_token": False, "global_pool": "avg"},
    ),
    Pair("attention pooling", {"head": {"type": "linear", "pool": "map"}}, {"global_pool": "map"}),
    Pair("registers", {"registers": 3}, {"reg_tokens": 3}),
    Pair(
        "registers without rows",
        {"registers": 3, "position": NO_EMBED_CLASS},
        {"reg_tokens": 3, "no_embed_class": True},
    ),
    Pair("layer scale", {"layer_scale": 0.1}, {"init_values": 0.1}),
    Pair("no_embed_class", {"position": NO_EMBED_CLASS}, {"no_embed_class": True}),
    Pair("no position", {"position": "none"}, {"pos_embed": "none"}),
    Pair("qk norm", {"attention": {"type": "explicit", "qk_norm": "layernorm"}}, {"qk_norm": True}),
    Pair("no qkv bias", {"attention": {"type": "sdpa", "qkv_bias": False}}, {"qkv_bias": False}),
    Pair("rmsnorm", {"norm": "rmsnorm", "final_norm": "rmsnorm"}, {"norm_layer": "rmsnorm"}),
    Pair("no final norm", {"final_norm": "none"}, {"final_norm": False}),
    Pair("gelu tanh", {"mlp": {"type": "gelu", "approximate": "tanh"}}, {"act_layer": "gelu_tanh"}),
    Pair(
        "swiglu",
        {"mlp": {"type": "swiglu", "ratio": 4.0}},
        {"mlp_layer": timm.layers.SwiGLU, "act_layer": "silu"},
    ),
    Pair("another ratio", {"mlp": {"type": "gelu", "ratio": 3.0}}, {"mlp_ratio": 3.0}),
    Pair("split", {"attention": "split"}, {}),
    Pair("per head", {"attention": "per_head"}, {}),
    Pair("mixed depths", {"blocks": {"1": {"attention": "per_head"}}}, {}),
    Pair("oblong patches", {"patch_size": [8, 16]}, {"patch_size": (8, 16)}),
    Pair("distilled", {"prefix": ["class", "distillation"], "head": "distilled"}, {}, VisionTransformerDistilled),
]


def randomised(of: nn.Module) -> nn.Module:
    """Set every parameter to random values, because zeros and ones hide errors."""
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in of.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=g) * 0.1)
    return of.eval()


def theirs_of(pair: Pair, data: DataInfo) -> nn.Module:
    # timm's own initialisation of its meta-free constructor draws from the global generator.
    with torch.random.fork_rng(devices=[]):
        return randomised(pair.build(img_size=data.image, **{**THEIRS, **pair.theirs}))


def ours_of(pair: Pair, data: DataInfo) -> ViT:
    built = model.build({"type": "vit", **SMALL, **pair.ours}, data)
    assert isinstance(built, ViT)
    return built.eval()


def logits(of: nn.Module, x: Tensor) -> Tensor:
    out = of(x)
    return of.logits_by_head(out)[""] if isinstance(of, Model) else out


@pytest.fixture
def x_BCHW() -> Tensor:
    return torch.randn(2, 3, *DATA.image, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("image", [(32, 32), (32, 48)], ids=["square", "oblong"])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_logits_equal_timm_in_both_directions(pair: Pair, image: tuple[int, int]) -> None:
    data = DataInfo(image=image, channels=3, classes=7)
    theirs, ours = theirs_of(pair, data), ours_of(pair, data)
    x = torch.randn(2, 3, *image, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours.load_state_dict(ours.from_canonical(theirs.state_dict()))
        torch.testing.assert_close(logits(ours, x), logits(theirs, x), atol=1e-5, rtol=1e-5)
        randomised(ours)
        theirs.load_state_dict(ours.to_canonical(ours.state_dict()))
        torch.testing.assert_close(logits(ours, x), logits(theirs, x), atol=1e-5, rtol=1e-5)


def test_rotary_equals_timm(x_BCHW: Tensor) -> None:
    pair = Pair(
        "rope",
        {"position": {"type": "rope2d", "theta": 100.0}},
        {
            "global_pool": "token",
            "use_abs_pos_emb": False,
            "use_rot_pos_emb": True,
            "rope_temperature": 100.0,
            "rope_grid_indexing": "xy",
            "attn_type": "rope",
        },
        Eva,
    )
    theirs, ours = theirs_of(pair, DATA), ours_of(pair, DATA)
    with torch.no_grad():
        ours.load_state_dict(ours.from_canonical(theirs.state_dict()))
        torch.testing.assert_close(logits(ours, x_BCHW), logits(theirs, x_BCHW), atol=1e-5, rtol=0)


@pytest.mark.parametrize("where", ["every_layer", "every_layer_shared"])
def test_positions_at_every_layer_equal_timm(where: str, x_BCHW: Tensor) -> None:
    position = {"type": "learned", "where": where}
    ours = randomised(model.build({"type": "vit", **SMALL, "position": position}, DATA))
    assert isinstance(ours, ViT)
    theirs = theirs_of(Pair("no position", {}, {"pos_embed": "none"}), DATA)
    state = ours.to_canonical(ours.state_dict())
    tables = state.pop("pos_embed")
    theirs.load_state_dict(state)
    x_BTD = torch.cat([theirs.cls_token.expand(2, -1, -1), theirs.patch_embed(x_BCHW)], 1)
    for index, block in enumerate(theirs.blocks):
        x_BTD = block(x_BTD + tables[index if where == "every_layer" else 0])
    torch.testing.assert_close(logits(ours, x_BCHW), theirs.forward_head(theirs.norm(x_BTD)), atol=1e-5, rtol=0)


def test_distilled_pair_equals_timm_in_training(x_BCHW: Tensor) -> None:
    pair = PAIRS[-1]
    theirs, ours = theirs_of(pair, DATA).train(), ours_of(pair, DATA).train()
    theirs.set_distilled_training(True)  # type: ignore[operator]
    ours.load_state_dict(ours.from_canonical(theirs.state_dict()))
    ours_out, (cls, dist) = ours(x_BCHW), theirs(x_BCHW)
    torch.testing.assert_close(ours_out.cls, cls, atol=1e-5, rtol=0)
    torch.testing.assert_close(ours_out.dist, dist, atol=1e-5, rtol=0)


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_canonical_form_round_trips_bitwise(pair: Pair) -> None:
    ours = randomised(ours_of(pair, DATA))
    assert isinstance(ours, ViT)
    state = ours.state_dict()
    back = ours.from_canonical(ours.to_canonical(state))
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)


def test_unfitting_checkpoint_is_named() -> None:
    with pytest.raises(RuntimeError, match="head_dist"):
        ours = ours_of(PAIRS[0], DATA)
        ours.load_state_dict(ours.from_canonical(theirs_of(PAIRS[-1], DATA).state_dict()))


# -- groups of parameters ---------------------------------------------------------------------------------------------


DECAYING = [pair for pair in PAIRS if pair.name not in ("split", "per head", "mixed depths")]


@pytest.mark.parametrize("pair", DECAYING, ids=str)
def test_weight_decay_exempts_same_parameters_as_timm(pair: Pair) -> None:
    theirs, ours = theirs_of(pair, DATA), ours_of(pair, DATA)
    groups = param_groups_weight_decay(theirs, 0.1, no_weight_decay_list=theirs.no_weight_decay())  # type: ignore[operator]
    spared = {id(parameter) for group in groups if group["weight_decay"] == 0 for parameter in group["params"]}
    expected = {name for name, parameter in theirs.named_parameters() if id(parameter) in spared}
    state = dict(ours.named_parameters())
    exempt = ours.to_canonical({name: state[name] for name in ours.no_weight_decay()})
    assert set(exempt) == expected


@pytest.mark.parametrize("attention", ["split", "per_head"])
def test_weight_decay_exempts_biases_of_every_attention(attention: str) -> None:
    ours = model.build({"type": "vit", **SMALL, "attention": attention}, DATA)
    exempt = ours.no_weight_decay()
    for name, parameter in ours.named_parameters():
        if ".attn." in name:
            assert (name in exempt) == name.endswith(".bias"), name
            assert (name in exempt) == (parameter.ndim == 1), name


@pytest.mark.parametrize("pair", [*DECAYING, PAIRS[-1]], ids=str)
def test_layer_order_equals_timm(pair: Pair) -> None:
    theirs, ours = theirs_of(pair, DATA), ours_of(pair, DATA)
    layers = timm.models.group_parameters(theirs, theirs.group_matcher(), reverse=True)  # type: ignore[operator]
    for name, _ in ours.named_parameters():
        (canonical,) = ours.to_canonical({name: torch.empty(0)})
        assert ours.layer_of(name) == layers[canonical], name
    assert {ours.layer_of(name) for name, _ in ours.named_parameters()} == {0, 1, 2, 3}


# -- assembly ---------------------------------------------------------------------------------------------------------


def test_order_of_tokens() -> None:
    built = model.build(
        {"type": "vit", **SMALL, "prefix": ["class", "distillation"], "registers": 2, "position": "none"}, DATA
    )
    assert built.geometry.prefix == ("class", "distillation", "register", "register")
    inputs: list[Tensor] = []
    built.blocks[0].register_forward_pre_hook(lambda module, arguments: inputs.append(arguments[0]))
    with torch.no_grad():
        for value, token in enumerate((built.cls_token, built.dist_token, built.reg_token), 1):
            token.fill_(value)
        built(torch.zeros(1, 3, *DATA.image))
    assert inputs[0][0, :4, 0].tolist() == [1, 2, 3, 3]
    assert inputs[0].shape == (1, 4 + 24, 48)


def test_drop_path_grows_like_timm() -> None:
    ours = model.build({"type": "vit", **{**SMALL, "depth": 5}, "drop_path": 0.3}, DATA)
    theirs = VisionTransformer(img_size=DATA.image, **{**THEIRS, "depth": 5}, drop_path_rate=0.3)
    for mine, other in zip(ours.blocks, theirs.blocks, strict=True):
        rate = getattr(other.drop_path1, "drop_prob", 0.0)
        assert mine.drop_path1.p == mine.drop_path2.p == pytest.approx(rate)
    assert ours.blocks[-1].drop_path1.p == pytest.approx(0.3)
    alone = model.build({"type": "vit", **{**SMALL, "depth": 1}, "drop_path": 0.3}, DATA)
    assert alone.blocks[0].drop_path1.p == 0


def test_dropout_is_keyed_and_off_in_evaluation(x_BCHW: Tensor) -> None:
    built = model.build(
        {
            "type": "vit",
            **SMALL,
            "drop": 0.2,
            "drop_path": 0.5,
            "mlp": {"type": "gelu", "drop": 0.2},
            "attention": {"type": "auto", "drop": 0.2, "proj_drop": 0.2},
        },
        DATA,
    )
    built.initialise(0)
    sample_B = torch.tensor([5, 9])

    def run(key: int, order: tuple[int, ...] = (0, 1)) -> Tensor:
        at = torch.tensor(order)
        with noise.use_model_draws(
            noise.Draws(noise.key(key, "dropout"), noise.key(key, "drop_path"), sample_B[at], key)
        ):
            return built(x_BCHW[at]).logits

    with torch.no_grad():
        assert torch.equal(run(0), run(0))
        assert not torch.equal(run(0), run(1))
        torch.testing.assert_close(run(0, (1, 0)).flip(0), run(0))  # a sample's draws do not depend on its place
        torch.testing.assert_close(run(0, (1,)), run(0)[1:])
        built.eval()
        plain = model.build({"type": "vit", **SMALL}, DATA)
        plain.initialise(0)
        assert torch.equal(built(x_BCHW).logits, plain.eval()(x_BCHW).logits)


def test_blocks_have_their_own_parts() -> None:
    built = model.build(
        {
            "type": "vit",
            **{**SMALL, "depth": 4},
            "blocks": {"0-1": {"attention": "split", "norm": "rmsnorm"}, "3": {"mlp": {"type": "swiglu", "ratio": 2}}},
        },
        DATA,
    )
    assert [type(block.attn).__name__ for block in built.blocks] == ["Split", "Split", "Auto", "Auto"]
    assert [type(block.norm1).__name__ for block in built.blocks] == ["RMSNorm", "RMSNorm", "LayerNorm", "LayerNorm"]
    assert [type(block.mlp).__name__ for block in built.blocks] == ["GeluMLP", "GeluMLP", "GeluMLP", "SwiGLU"]


@pytest.mark.parametrize(
    ("blocks", "sentence"),
    [
        ({"1-2": {"mlp": "swiglu"}}, "blocks '1-2' do not exist; the model has blocks 0 to 1"),
        ({"1-0": {"mlp": "swiglu"}}, "blocks '1-0' do not exist"),
        ({"0-1": {"mlp": "swiglu"}, "1": {"norm": "none"}}, "block 1 is in '0-1' and in '1'; remove one"),
    ],
)
def test_missing_blocks_are_refused(blocks: Mapping[str, Any], sentence: str) -> None:
    with pytest.raises(GeometryError, match=sentence):
        ViT.incompatibility(DATA, {**SMALL, "blocks": blocks})


def test_block_names_follow_yaml() -> None:
    block_choice = model.resolve_choice({"type": "vit", "blocks": {3: {"mlp": "swiglu"}}})
    assert list(block_choice.plain()["blocks"]) == ["3"]
    assert ViT.incompatibility(DATA, {**block_choice.options, "patch_size": 8}) is None
    with pytest.raises(OptionError, match="blocks"):
        model.resolve_choice({"type": "vit", "blocks": {"last": {"mlp": "swiglu"}}})


def test_mistakes_inside_blocks_have_a_place() -> None:
    with pytest.raises(OptionError) as caught:
        model.resolve_choice({"type": "vit", "blocks": {"0": {"attention": "spilt"}}})
    ((path, sentence),) = caught.value.faults
    assert path[:3] == ("blocks", "0", "attention")
    assert "Did you mean 'split'?" in sentence


# -- sizes ------------------------------------------------------------------------------------------------------------


def test_size_is_expanded_on_resolve() -> None:
    plain = model.resolve_choice({"type": "vit", "size": "g"}).plain()
    assert (plain["dim"], plain["depth"], plain["heads"]) == (1408, 40, 16)
    assert int(plain["dim"] * plain["mlp"]["ratio"]) == 6144
    assert model.resolve_choice(plain).plain() == plain
    big = model.resolve_choice({"type": "vit", "size": "G"}).plain()
    assert int(big["dim"] * big["mlp"]["ratio"]) == 8192


def test_explicit_option_overrides_size() -> None:
    plain = model.resolve_choice({"type": "vit", "size": "S", "depth": 3, "mlp": {"type": "gelu", "ratio": 2}}).plain()
    assert (plain["dim"], plain["depth"], plain["heads"], plain["mlp"]["ratio"]) == (384, 3, 6, 2)
    assert model.resolve_choice({"type": "vit", "size": "g", "mlp": "swiglu"}).plain()["mlp"]["ratio"] == pytest.approx(
        8 / 3
    )


def test_size_and_its_numbers_are_one_trial() -> None:
    by_name = model.resolve_choice({"type": "vit", "size": "S"})
    by_number = model.resolve_choice({"type": "vit", "dim": 384, "depth": 12, "heads": 6})
    assert by_name.hashed() == by_number.hashed()
    assert by_name.hashed() != model.resolve_choice({"type": "vit", "size": "B"}).hashed()


def test_default_size_is_tiny() -> None:
    plain = model.resolve_choice("vit").plain()
    assert (plain["dim"], plain["depth"], plain["heads"], plain["patch_size"]) == (192, 12, 3, 16)


def test_unknown_size_gives_one_sentence() -> None:
    with pytest.raises(OptionError, match="size"):
        model.resolve_choice({"type": "vit", "size": "Tiny"})
    assert set(get_args(SizeName)) == set(SIZES)


@pytest.mark.parametrize(("option", "value"), [("mlp", None), ("mlp", False), ("prefix", None), ("dim", "wide")])
def test_size_expansion_hides_no_mistake(option: str, value: object) -> None:
    with pytest.raises(OptionError) as caught:
        model.resolve_choice({"type": "vit", "size": "S", option: value})
    assert [path[0] for path, _ in caught.value.faults] == [option]


def test_python_constructor_equals_yaml() -> None:
    direct = ViT(DATA, size="pico", patch_size=8, blocks={"1": {"mlp": "swiglu"}})
    assert (direct.geometry.dim, direct.geometry.depth) == (32, 2)
    assert type(direct.blocks[1].mlp).__name__ == "SwiGLU"


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"prefix": []}, "pooling 'cls' reads the class token, and the model has none"),
        ({"head": "distilled"}, "has no distillation token"),
        ({"head": "distilled", "prefix": []}, "has no class and no distillation token"),
        ({"prefix": ["distillation", "class"]}, "found \\[distillation, class\\]"),
        ({"prefix": ["class", "class"]}, "found \\[class, class\\]"),
        (
            {"head": "segmentation"},
            "head 'segmentation' is for segmentation, and the task of the data is classification",
        ),
        ({"position": "sincos2d", "dim": 42, "heads": 3}, "multiple of 4"),
        ({"attention": {"type": "sdpa", "drop": 0.1}}, "cannot drop attention weights"),
        ({"blocks": {"1": {"attention": {"type": "sdpa", "drop": 0.1}}}}, "cannot drop attention weights"),
    ],
)
def test_impossible_combinations_give_one_sentence(options: Mapping[str, Any], sentence: str) -> None:
    full = {**SMALL, **options}
    reason = ViT.incompatibility(DATA, full)
    assert reason is not None
    with pytest.raises(OptionError, match=sentence) as caught:
        model.build({"type": "vit", **full}, DATA)
    assert reason in str(caught.value)


def test_possible_combinations_have_no_reason() -> None:
    assert ViT.incompatibility(DATA, SMALL) is None
    assert ViT.incompatibility(DATA, model.resolve_choice({"type": "vit", **SMALL}).options) is None


@pytest.mark.parametrize(
    ("options", "option", "sentence"),
    [
        ({"patch_size": 7}, "patch_size", "32 is not a multiple of patch_size 7"),
        ({"patch_size": [8, 7]}, "patch_size", "48 is not a multiple of patch_size 7"),
        ({"heads": 5}, "heads", "dim 48 is not a multiple of heads 5"),
    ],
)
def test_non_dividing_sizes_are_refused(options: Mapping[str, Any], option: str, sentence: str) -> None:
    with pytest.raises(GeometryError, match=sentence) as caught:
        ViT.incompatibility(DATA, {**SMALL, **options})
    assert {options[0] for options, _ in caught.value.faults} == {option}


@pytest.fixture
def strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return an attention without bias and rotation, and a head without separate pool and classify."""
    from vitlab.components.attention import Attention
    from vitlab.components.head import Head, Logits

    class Deaf(Attention):
        takes_bias = False
        takes_rotation = False
        canonical = None

        def __init__(self, g: Any) -> None:
            super().__init__()
            self.mixer = nn.Linear(g.dim, g.dim)

        def forward(self, x_BTD: Tensor, rotation: Any, bias_HTT: Any) -> Tensor:
            return self.mixer(x_BTD)

    class Whole(Head):
        def __init__(self, g: Any) -> None:
            super().__init__()
            self.out = nn.Linear(g.dim, g.classes)

        def forward(self, x_BTD: Tensor) -> Any:
            return Logits(self.out(x_BTD.mean(1)))

    slot_fixtures.keep(monkeypatch, slot("attention"), slot("head"))
    slot("attention").register("deaf")(Deaf)
    slot("head").register("whole")(Whole)


@pytest.mark.usefixtures("strangers")
def test_capabilities_are_checked(x_BCHW: Tensor) -> None:
    for position in slot("position").names():
        component = slot("position").get(position)
        reason = ViT.incompatibility(DATA, {**SMALL, "position": position, "blocks": {"1": {"attention": "deaf"}}})
        # Of "together", the part is named that the attention does not support.
        if position != "together" and (component.overrides("bias") or component.overrides("rotation")):
            assert reason is not None
            assert position in reason
            assert "'deaf' (block 1)" in reason
    assert ViT.incompatibility(DATA, {**SMALL, "position": "learned", "attention": "deaf"}) is None


@pytest.mark.usefixtures("strangers")
def test_plugin_with_minimal_contract_works(x_BCHW: Tensor) -> None:
    options = {"type": "vit", **SMALL, "attention": "deaf", "head": "whole"}
    built = model.build(options, DATA)
    built.initialise(3)
    assert built(x_BCHW).logits.shape == (2, 7)
    assert built.blocks[0].attn.mixer.weight.std().item() == pytest.approx(0.02, rel=0.1)
    state = built.state_dict()
    assert built.from_canonical(built.to_canonical(state)).keys() == state.keys()
    assert ViT.incompatibility(DATA, {**SMALL, "head": "whole"}) is None
    assert "final_norm_at cannot be pooled" in (
        ViT.incompatibility(DATA, {**SMALL, "head": "whole", "final_norm_at": "pooled"}) or ""
    )


# -- as a module ------------------------------------------------------------------------------------------------------


def test_copies_and_pickles(x_BCHW: Tensor) -> None:
    built = model.build({"type": "vit", **SMALL}, DATA)
    built.initialise(0)
    for other in (copy.deepcopy(built), pickle.loads(pickle.dumps(built))):
        assert torch.equal(other(x_BCHW).logits, built(x_BCHW).logits)
        other.initialise(1)
        assert not torch.equal(other(x_BCHW).logits, built(x_BCHW).logits)


def test_vmap_over_replicates(x_BCHW: Tensor) -> None:
    replicas = [model.build({"type": "vit", **SMALL, "attention": "explicit"}, DATA) for _ in range(3)]
    for seed, replica in enumerate(replicas):
        replica.initialise(seed)
    assert all(replica.vmap_safe for replica in replicas)
    parameters, buffers = torch.func.stack_module_state(replicas)
    out = torch.vmap(lambda p, b: torch.func.functional_call(replicas[0], (p, b), (x_BCHW,)))(parameters, buffers)
    for index, replica in enumerate(replicas):
        torch.testing.assert_close(out.logits[index], replica(x_BCHW).logits, atol=1e-5, rtol=1e-5)
