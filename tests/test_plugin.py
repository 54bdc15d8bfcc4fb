"""Tests of plugins: listed without import, isolated from each other, and broken only for their users."""

from __future__ import annotations

import importlib
import os
import py_compile
import re
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import slot_fixtures
import torch

import vitlab
from vitlab import errors, registry
from vitlab.cli.show import study_schema
from vitlab.components.norm import norm
from vitlab.errors import BrokenComponent, ClashError, OptionError, SpecError, UnknownComponent, UserError
from vitlab.geometry import Geometry
from vitlab.registry import Slot, plugins, slot
from vitlab.testing import check_component, components

DYT = """
    from typing import Annotated

    import torch
    from pydantic import Field
    from torch import Tensor, nn

    from vitlab.components.norm import Norm

    print("IMPORTED", __name__)

    class DyT(Norm):
        '''Dynamic tanh.  Reference: arXiv:2503.10622.'''

        def __init__(self, dim: int, *, alpha: Annotated[float, Field(gt=0)] = 0.5) -> None:
            super().__init__()
            self.alpha = nn.Parameter(torch.tensor(alpha))
            self.weight = nn.Parameter(torch.ones(dim))

        def forward(self, x_BTD: Tensor) -> Tensor:
            return torch.tanh(self.alpha * x_BTD) * self.weight
"""


def install(site: Path, name: str, version: str, code: str, points: dict[str, list[str]]) -> None:
    """Lay out a distribution like pip: its module, and metadata with entry points."""
    (site / f"{name}.py").write_text(textwrap.dedent(code))
    info = site / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")
    groups = [f"[{group}]\n" + "".join(f"{line}\n" for line in lines) for group, lines in points.items()]
    (info / "entry_points.txt").write_text("\n".join(groups))
    look_again()


def look_again() -> None:
    """Clear the cached list of installed plugins."""
    importlib.invalidate_caches()
    plugins._read_entry_points.cache_clear()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder whose distributions are installed until the test ends."""
    there = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - there:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
    monkeypatch.undo()
    look_again()


def faults(room: Slot[Any], choice: Any) -> list[tuple[errors.Path, str]]:
    with pytest.raises(OptionError) as caught:
        room.resolve_choice(choice)
    return list(caught.value.faults)


def failure_of(room: Slot[Any], name: str) -> str:
    with pytest.raises(BrokenComponent) as caught:
        room.resolve_choice(name)
    return str(caught.value)


def test_plugins_are_listed_without_import(site: Path) -> None:
    install(site, "acme_vit", "1.2.0", DYT, {"vitlab.norm": ["tanh = acme_vit:DyT"]})
    assert [str(entry.origin) for entry in registry.list_entries("norm") if entry.name == "tanh"] == ["acme-vit 1.2.0"]
    assert "tanh" in norm.names() and "acme_vit" not in sys.modules
    assert norm.get("tanh").__module__ == "acme_vit" and "acme_vit" in sys.modules


def test_plugin_works_like_builtin(site: Path) -> None:
    install(site, "acme_vit", "1.2.0", DYT, {"vitlab.norm": ["tanh = acme_vit:DyT"]})
    check_component("norm", "tanh")
    choice = norm.resolve_choice({"type": "tanh", "alpha": 2})
    assert choice.plain() == {"type": "tanh", "alpha": 2.0} and str(choice.origin) == "acme-vit 1.2.0"
    assert norm.build(choice, 4).alpha.item() == 2.0  # type: ignore[attr-defined]
    below, unknown = faults(norm, {"type": "tanh", "alpha": 0}), faults(norm, {"type": "tanh", "alhpa": 1})
    assert below == [(("alpha",), "norm 'tanh': alpha must be greater than 0; found 0")]
    assert unknown == [(("alhpa",), "norm 'tanh' has no option 'alhpa'. Did you mean 'alpha'? Options: alpha.")]
    ((path, text),) = faults(norm, "tahn")
    assert path == ("type",) and text.startswith("no norm called 'tahn'. Did you mean 'tanh'? Installed: ")
    nested = slot("attention").resolve_choice({"type": "explicit", "qk_norm": "tanh"}).plain()["qk_norm"]
    assert nested == {"type": "tanh", "alpha": 0.5}
    assert [name for name in components("norm") if "tanh" in name] == ["tanh"]


def test_name_offered_by_two_sources_is_ambiguous(site: Path) -> None:
    install(site, "acme_vit", "1.2.0", DYT, {"vitlab.norm": ["tanh = acme_vit:DyT"]})
    both = ["tanh = other_vit:DyT", "layernorm = other_vit:DyT", "good = other_vit:DyT"]
    install(site, "other_vit", "0.1", DYT, {"vitlab.norm": both})

    def clash(name: str) -> str:
        with pytest.raises(ClashError) as caught:
            norm.find(name)
        return str(caught.value)

    sentence = "norm 'tanh' is offered by acme-vit and other-vit; write 'acme-vit:tanh' or 'other-vit:tanh'."
    assert clash("tanh") == sentence
    assert clash("layernorm") == (
        "norm 'layernorm' is offered by other-vit and vitlab; write 'other-vit:layernorm' or 'vitlab:layernorm'."
    )
    modules = {
        name: norm.get(name).__module__ for name in ("acme-vit:tanh", "other-vit:tanh", "vitlab:layernorm", "good")
    }
    assert [*modules.values()] == ["acme_vit", "other_vit", "vitlab.components.norm", "other_vit"]
    assert clash("tanh") == sentence, "also once both have been imported"
    assert [name for name in components("norm") if name.endswith("tanh")] == ["acme-vit:tanh", "other-vit:tanh"]
    assert norm.resolve_choice("acme-vit:tanh").plain() == {"type": "acme-vit:tanh", "alpha": 0.5}
    assert faults(norm, "tanh") == [(("type",), sentence)]
    with pytest.raises(UnknownComponent, match=r"^no norm called 'nobody:tanh'\."):
        norm.find("nobody:tanh")


def test_broken_plugin_fails_only_studies_that_name_it(site: Path) -> None:
    fails = "def first():\n    import a_module_that_is_not\nfirst()\n"
    offered = {"vitlab.norm": ["broken = broken_vit:Norm", "half = broken_vit:Norm"]}
    install(site, "broken_vit", "0.3.1", fails, {**offered, "vitlab.executor": ["cloud = broken_vit:X"]})
    code = "from torch import nn\nclass Wrong(nn.Module):\n    'No norm.'\ndef function(): ...\n"
    points = ["wrong = wrong_vit:Wrong", "function = wrong_vit:function", "gone = wrong_vit:Gone"]
    install(site, "wrong_vit", "2", code, {"vitlab.norm": points})
    message = failure_of(norm, "broken")
    first = "norm 'broken' from broken-vit 0.3.1 failed to import: ModuleNotFoundError: No module named 'a_module_that_is_not', at "
    file = site / "broken_vit.py"
    place = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
    assert message == f"{first}{place}:2"
    place = str(place).replace("broken_vit", "wrong_vit")
    for name, line in (("wrong", 2), ("function", 4)):
        sentence = f"norm '{name}' ({place}:{line}) is no Norm: norm components derive from vitlab.plugin.Norm"
        assert failure_of(norm, name) == sentence
    gone = failure_of(norm, "gone")
    assert (
        "gone" in gone and "AttributeError" in gone and gone.endswith("; reinstall it after editing its entry points")
    )
    assert "executor 'cloud' from broken-vit 0.3.1 failed to import" in failure_of(slot("executor"), "cloud")
    assert norm.resolve_choice("layernorm").plain() == {"type": "layernorm", "eps": 1e-6, "affine": "scale_and_shift"}
    assert slot("executor").resolve_choice("local").plain() == {"type": "local"}
    assert {"broken", "half", "wrong", "layernorm"} <= {entry.name for entry in registry.list_entries("norm")}


# -- files ------------------------------------------------------------------------------------------------------------

FILE = """
    from torch import Tensor

    from vitlab.components.norm import Norm, norm

    @norm.register("{name}")
    class Halved(Norm):
        '''Half of it.'''

        def __init__(self, dim: int, *, by: float = {by}) -> None:
            super().__init__()
            self.by = by

        def forward(self, x_BTD: Tensor) -> Tensor:
            return x_BTD * self.by
"""


@pytest.fixture(autouse=True)
def _slots_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    slot_fixtures.keep(monkeypatch, norm)


def write(file: Path, name: str = "halved", by: float = 0.5, after: str = "") -> Path:
    file.parent.mkdir(exist_ok=True)
    file.write_text(textwrap.dedent(FILE.format(name=name, by=by)) + after)
    return file


def test_plugin_file_registers_components_with_code_digest(tmp_path: Path) -> None:
    file = write(tmp_path / "my_blocks.py")
    origin = registry.load_file(file)
    assert origin.source == "my_blocks.py" and len(origin.version) == 16
    choice = norm.resolve_choice({"type": "halved", "by": 0.25})
    assert choice.origin == origin
    assert norm.build(choice, 4).by == 0.25  # type: ignore[attr-defined]
    assert norm.get("my_blocks.py:halved") is choice.component
    (entry,) = [entry for entry in registry.list_entries("norm") if entry.name == "halved"]
    assert entry.origin == origin and entry.target.endswith(":Halved")
    assert registry.load_file(str(file)) == origin  # loading it twice registers it once
    with pytest.raises(OptionError, match=r"no option 'bye'. Did you mean 'by'"):
        norm.resolve_choice({"type": "halved", "bye": 1})


@pytest.mark.parametrize("module", ["__main__", "elsewhere"])
def test_component_that_workers_cannot_import_is_refused_at_planning(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot_fixtures.keep(monkeypatch, norm)
    norm.register("own")(type("Own", (norm.get("layernorm"),), {"__module__": module, "__doc__": "Own."}))
    changes = {"model.norm": "own", "run.executor": "local"}
    with pytest.raises(
        SpecError, match=r"norm 'own' is defined in .* executor 'local' do not import; give them a file"
    ):
        vitlab.plan("quickstart", out=tmp_path, changes=changes)
    assert len(vitlab.plan("quickstart", out=tmp_path, changes={**changes, "run.executor": "inline"}))
    plugin = write(tmp_path / "other.py", name="other")
    if module == "__main__":
        with pytest.raises(SpecError, match="this notebook or script"):
            vitlab.plan("quickstart", out=tmp_path, changes=changes, plugins=[plugin])
    else:  # the file may import it
        assert len(vitlab.plan("quickstart", out=tmp_path, changes=changes, plugins=[plugin]))


def test_plugin_file_reads_files_beside_it(tmp_path: Path) -> None:
    (tmp_path / "table.txt").write_text("seven")
    (tmp_path / "with_table.py").write_text(
        "import pkgutil\nassert pkgutil.get_data(__name__, 'table.txt') == b'seven'\n"
    )
    registry.load_file(tmp_path / "with_table.py")


def test_edited_plugin_file_is_read_again(tmp_path: Path) -> None:
    file = write(tmp_path / "my_blocks.py")
    first = registry.load_file(file)
    write(file, by=0.125)
    second = registry.load_file(file)
    assert second != first and second.source == first.source
    assert norm.resolve_choice("halved").plain() == {"type": "halved", "by": 0.125}
    assert norm.resolve_choice("halved").origin == second
    assert [entry.origin for entry in registry.list_entries("norm") if entry.name == "halved"] == [second]
    write(file, name="quartered")
    registry.load_file(file)
    assert "quartered" in norm.names() and "halved" not in norm.names()


def test_plugin_file_runs_digested_text_despite_bytecode_cache(tmp_path: Path) -> None:
    """Python considers bytecode current if the source has the same size and modification second."""
    file = write(tmp_path / "my_blocks.py", by=0.25)
    py_compile.compile(str(file))
    before = file.stat()
    write(file, by=0.75)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size
    registry.load_file(file)
    assert norm.resolve_choice("halved").plain() == {"type": "halved", "by": 0.75}


def test_failing_plugin_file_leaves_nothing_and_can_be_fixed(tmp_path: Path) -> None:
    file = write(tmp_path / "my_blocks.py", after="\nraise RuntimeError('half way')\n")
    with pytest.raises(
        BrokenComponent, match=r"plugin file .*my_blocks.py failed: RuntimeError: half way, at .*my_blocks.py:17$"
    ):
        registry.load_file(file)
    assert "halved" not in norm.names()
    write(file)
    registry.load_file(file)
    assert norm.resolve_choice("halved").plain() == {"type": "halved", "by": 0.5}


def test_failing_edit_leaves_nothing_until_it_is_mended(tmp_path: Path) -> None:
    file = write(tmp_path / "my_blocks.py")
    first = registry.load_file(file)
    write(file, by=0.125, after="\nraise RuntimeError('half way')\n")
    with pytest.raises(BrokenComponent):
        registry.load_file(file)
    assert "halved" not in norm.names()
    write(file)
    assert registry.load_file(file) == first == norm.resolve_choice("halved").origin


def test_invalid_plugin_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no_such.py: this is not a file; .* an installed package needs none"):
        registry.load_file(tmp_path / "no_such.py")
    os.mkfifo(tmp_path / "pipe.py")
    for endless in (tmp_path / "pipe.py", Path("/dev/zero")):
        with pytest.raises(UserError, match="this is not a file"):
            registry.load_file(endless)
    (tmp_path / "grammar.py").write_text("def (:\n")
    with pytest.raises(BrokenComponent, match=r"SyntaxError: invalid syntax .*, at .*grammar.py:1$"):
        registry.load_file(tmp_path / "grammar.py")
    (tmp_path / "class.py").write_text(
        "from vitlab.components.norm import norm\n@norm.register('wrong')\nclass Wrong:\n    'No norm.'\n"
    )
    with pytest.raises(BrokenComponent, match=r"norm 'wrong' \(.*class.py:2\) is no Norm"):
        registry.load_file(tmp_path / "class.py")
    (tmp_path / "blocks.txt").write_text("x = 1\n")
    with pytest.raises(UserError, match=r"blocks.txt: rename it so that it ends in .py"):
        registry.load_file(tmp_path / "blocks.txt")
    (tmp_path / "exits.py").write_text("import sys\nsys.exit('bye')\n")
    with pytest.raises(BrokenComponent, match="SystemExit"):
        registry.load_file(tmp_path / "exits.py")


FORWARD = "    def forward(self, x_BTD):\n        return x_BTD\n"
GEOMETRY = Geometry(image=(8, 8), channels=1, patch=(4, 4), prefix=(), dim=8, depth=1, heads=2, classes=3)
OWN = "from functools import partialmethod\nfrom torch import nn\nfrom vitlab.plugin import *\n@{slot}.register('own')\nclass Own({base}):\n    'An example.'\n"


@pytest.mark.parametrize(
    ("slot_name", "base", "method", "sentence"),
    [
        (
            "mlp",
            "MLP",
            "__init__(self, g, alpha=1)",
            r"Own: write '\*, ' before 'alpha' in __init__: .* \*, alpha: int = 1",
        ),
        (
            "mlp",
            "MLP",
            "__init__(self, g, alpha)",
            r"missing 1 .* 'alpha'; write __init__\(self, Geometry, \*, OPTION: TYPE = DEFAULT\)$",
        ),
        ("mlp", "MLP", "__init__(self)", r"takes 1 positional .*; write __init__\(self, Geometry, \*"),
        ("mlp", "MLP", "__init__(self, g, **options)", r"Own: replace \*\*options by options with names"),
        ("position", "Position", "add(self, x)", r"define its method add\(self, x_BTD, layer\)"),
        ("head", "Head", "classify(self)", r"define its method classify\(self, x_BSD\)"),
        (
            "loss",
            "Loss",
            "forward(self, logits, target)",
            r"define __call__\(self, logits_by_head, target\), which the class lacks$",
        ),
        ("augment", "Augment", "__call__(self, x)", r"define its method __call__\(self, x_BCHW, key, id_B\), with"),
        ("metric", "Metric", "__call__(self, x)", r"define rows\(self, logits, target\), which the class lacks$"),
        ("executor", "Executor", "submit(self, job)", r"define poll\(.*\), cancel\(.*\), which the class lacks$"),
        (
            "optimizer",
            "nn.Module",
            "build(self, groups)",
            r"is no Optimizer: .* derive from vitlab.plugin.Optimizer",
        ),
    ],
)
def test_mistake_of_an_author_is_answered_by_what_to_type(
    slot_name: str, base: str, method: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot_fixtures.keep(monkeypatch, slot(slot_name))
    file = tmp_path / "own.py"
    file.write_text(f"{OWN.format(slot=slot_name, base=base)}{FORWARD}    def {method}:\n        super().__init__()\n")
    with pytest.raises(BrokenComponent, match=sentence):
        registry.load_file(file)
        slot(slot_name).build("own", GEOMETRY)


def test_wrong_defaults_are_among_the_mistakes_of_a_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slot_fixtures.keep(monkeypatch, slot("mlp"))
    file = tmp_path / "own.py"
    constructor = "def __init__(self, g, *, k: int = 'x', m: int = 'y', n: int = 1)"
    file.write_text(f"{OWN.format(slot='mlp', base='MLP')}{FORWARD}    {constructor}:\n        super().__init__()\n")
    registry.load_file(file)
    with pytest.raises(OptionError) as error:
        slot("mlp").resolve_choice({"type": "own", "n": "z"})
    found = dict(error.value.faults)
    assert found.keys() == {("k",), ("m",), ("n",)}
    assert re.search(r"own.py:\d+: the default of 'k': .*must be a whole number; found 'x'$", found["k",])
    assert "default" not in found["n",]


def test_part_without_constructor_and_methods_of_every_kind_are_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot_fixtures.keep(monkeypatch, *map(slot, ("mlp", "metric", "loss", "head")))
    for slot_name, base, method in (
        ("mlp", "MLP", "def forward(self, x): return x + 1"),
        ("metric", "Metric", "@staticmethod\n    def rows(x, y): return x.argmax(1) == y"),
        ("loss", "Loss", "@classmethod\n    def __call__(cls, logits, target): pass"),
        ("head", "Head", "def by(self, how, x): pass\n    classify = partialmethod(by, 'mean')"),
    ):
        file = tmp_path / f"own_{slot_name}.py"
        file.write_text(f"{OWN.format(slot=slot_name, base=base)}    {method}\n")
        registry.load_file(file)
    assert slot("mlp").build("own", None)(1) == 2
    check_component("metric", "own")


def test_forgotten_registration_is_answered(tmp_path: Path) -> None:
    registry.load_file(write(tmp_path / "half.py"))
    with pytest.raises(
        OptionError,
        match=r"'halve'. Did you mean 'halved'\? half.py registers halved as norm; @norm.register\('halve'\) adds",
    ):
        norm.resolve_choice("halve")


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("from vitlab.executors.base import Ended", "Import from vitlab.plugin, whose names stay, or pin the vitlab"),
        ("import vitlab.former", "Import from vitlab.plugin, whose names stay, or pin the vitlab"),
        (
            "raise RuntimeError('operator torchvision::nms does not exist')",
            "call torchvision.. of vitlab.plugin before",
        ),
        ("class Boom(BaseException): ...\nraise Boom('bang')", "failed: Boom: bang, at "),
    ],
)
def test_failing_import_says_what_to_do(code: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(f"{code}\n")
    with pytest.raises(BrokenComponent, match=sentence):
        registry.load_file(tmp_path / "fails.py")


def test_name_that_vitlab_had_is_reported_with_the_pin_of_the_plugin(site: Path) -> None:
    install(site, "old_vit", "1.0", "from vitlab.trackers import Mark\n", {"vitlab.norm": ["old = old_vit:Norm"]})
    with (site / "old_vit-1.0.dist-info" / "METADATA").open("a") as file:
        file.write("Requires-Dist: vitlab>=0.1.0\n")
    look_again()
    message = failure_of(norm, "old")
    assert message.startswith("norm 'old' from old-vit 1.0 failed to import: ImportError")
    assert "vitlab.plugin" in message


def test_kernel_without_a_deterministic_form_points_to_the_study() -> None:
    """Torch's own advice, warn_only, is a call that no study can make."""
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError, match="warn_only") as caught:
            torch.ones(3).put_(torch.tensor([0]), torch.tensor([1.0]))
    finally:
        torch.use_deterministic_algorithms(False)
    sentence = plugins.sentence_with_place(caught.value)
    assert "does not have a deterministic implementation" in sentence and "warn_only" not in sentence
    assert sentence.endswith("; run.deterministic: false allows it, and runs then differ")
    own = "the kernel is 3, but you set 4"
    assert plugins.sentence_with_place(ValueError(own)) == f"ValueError: {own}"


ODD = """
from __future__ import annotations
from typing import TYPE_CHECKING
from torch import nn
from vitlab.components.norm import LayerNorm, norm
if TYPE_CHECKING:
    from decimal import Decimal
@norm.register("typed")
class Typed(LayerNorm):
    '''An annotation that is there for type checkers alone.'''
    def __init__(self, dim: int, *, by: Decimal = 1) -> None: ...
@norm.register("bare")
class Bare(LayerNorm):
    '''No annotation.'''
    def __init__(self, dim: int, *, by=1) -> None: ...
@norm.register("hidden")
class Hidden(LayerNorm):
    '''A name that pydantic would leave out.'''
    def __init__(self, dim: int, *, _by: int = 1) -> None: ...
@norm.register("modal")
class Modal(LayerNorm):
    '''A name that every torch module has.'''
    def __init__(self, dim: int, *, training: bool = True) -> None: ...
@norm.register("called")
class Called(LayerNorm):
    '''An option that JSON Schema has no words for.'''
    def __init__(self, dim: int, *, by: nn.Module | None = None) -> None: ...
"""


def test_unreadable_options_are_reported_and_left_out_of_schema(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(ODD)
    registry.load_file(tmp_path / "odd.py")
    for name, words in {
        "typed": "Typed: its annotations cannot be read: .*'Decimal'",
        "bare": r"odd.py:\d+: Bare: option 'by' needs an annotation, such as by: float",
        "hidden": "Hidden: rename option '_by': .* a leading '_' marks what is private",
        "modal": "Modal: rename option 'training': .* 'training' an attribute of every torch module",
    }.items():
        with pytest.raises(BrokenComponent, match=words):
            norm.resolve_choice(name)
    names = study_schema()["$defs"]["slot.norm"]["anyOf"][0]["enum"]
    assert "layernorm" in names and not {"typed", "bare", "hidden", "modal", "called"} & set(names)


@pytest.mark.parametrize("text", ["from vitlab.plugin import Positon", "import vitlab.plugin as p\nx = p.Positon"])
def test_misspelt_name_of_the_door_brings_the_nearest(text: str, tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(text)
    with pytest.raises(BrokenComponent, match=r"odd.py failed: .* Did you mean 'Position'\?"):
        registry.load_file(tmp_path / "odd.py")


def test_two_plugin_files_with_equal_name_and_component(tmp_path: Path) -> None:
    registry.load_file(write(tmp_path / "a" / "blocks.py"))
    with pytest.raises(ClashError, match=r"norm 'halved' is registered twice in blocks.py"):
        registry.load_file(write(tmp_path / "b" / "blocks.py", by=0.1))
    assert norm.resolve_choice("halved").plain()["by"] == 0.5


def test_two_classes_of_one_name_in_a_file_are_two_components(tmp_path: Path) -> None:
    file = write(tmp_path / "twins.py")
    file.write_text(file.read_text() + textwrap.dedent(FILE.format(name="quartered", by=0.25)))
    registry.load_file(file)
    built = [norm.resolve_choice(name).plain()["by"] for name in ("halved", "quartered")]
    assert built == [0.5, 0.25], "the second class takes the place of the first in the module alone"


def test_plugin_file_clashes_with_builtin_only_if_used(tmp_path: Path) -> None:
    registry.load_file(write(tmp_path / "blocks.py", name="rmsnorm"))
    with pytest.raises(ClashError, match=r"write 'blocks.py:rmsnorm' or 'vitlab:rmsnorm'"):
        norm.find("rmsnorm")
    assert norm.resolve_choice("layernorm").origin.source == "vitlab"
    assert norm.get("vitlab:rmsnorm").__module__ == "vitlab.components.norm"


# -- example ----------------------------------------------------------------------------------------------------------

EXAMPLE = Path(__file__).parent.parent / "plugins" / "vitlab-example"


def test_example_is_its_own_distribution(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slot_fixtures.keep(monkeypatch, slot("position"))
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    ((group, points),) = project["entry-points"].items()
    ((name, target),) = points.items()
    module, _, cls = target.partition(":")
    assert group == "vitlab.position"
    code = (EXAMPLE / f"{module}.py").read_text()
    install(site, module, project["version"], code, {group: [f"{name} = {target}"]})
    own = f"{project['name']}:{name}"
    check_component("position", own)
    component, origin = slot("position").find(own)
    assert (component.__qualname__, str(origin)) == (cls, f"{project['name']} {project['version']}")
