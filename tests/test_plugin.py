"""Guests: listed without being imported, never in each other's way, and broken only for those who name them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import rooms

from vitlab import slots
from vitlab.components.norm import norm
from vitlab.errors import BrokenComponent, ClashError, OptionError
from vitlab.schema import study_schema

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
    """Lay a distribution down as pip would: its module, and metadata with entry points."""
    site.mkdir(exist_ok=True)
    (site / f"{name}.py").write_text(textwrap.dedent(code))
    info = site / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")
    groups = [f"[{group}]\n" + "".join(f"{line}\n" for line in lines) for group, lines in points.items()]
    (info / "entry_points.txt").write_text("\n".join(groups))


def tell(site: Path, script: str) -> Any:
    """Run a script beside the installed distributions; what it assigns to ``told`` comes back."""
    preamble = "import json\nfrom vitlab import errors, slots\nfrom vitlab.slots import slot\n"
    code = preamble + textwrap.dedent(script) + "\nprint(json.dumps(told))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(site)}
    )
    assert done.returncode == 0, done.stderr
    *before, last = done.stdout.splitlines()
    return {"printed": before, "told": json.loads(last)}


def test_guests_are_listed_without_being_imported(tmp_path: Path) -> None:
    install(tmp_path, "acme_vit", "1.2.0", DYT, {"vitlab.norm": ["dyt = acme_vit:DyT"]})
    script = """
        listed = [str(entry.origin) for entry in slots.listing("norm") if entry.name == "dyt"]
        names = slot("norm").names()
        import sys
        told = [listed, "dyt" in names, "acme_vit" in sys.modules]
    """
    assert tell(tmp_path, script) == {"printed": [], "told": [["acme-vit 1.2.0"], True, False]}


def test_a_guest_works_as_a_built_in_does(tmp_path: Path) -> None:
    install(tmp_path, "acme_vit", "1.2.0", DYT, {"vitlab.norm": ["dyt = acme_vit:DyT"]})
    script = """
        from vitlab.components.mlp import mlp
        from vitlab.testing import check_component, components
        check_component("norm", "dyt")
        found = slot("norm").resolve({"type": "dyt", "alpha": 2})
        def fault(choice):
            try:
                slot("norm").resolve(choice)
            except errors.OptionError as error:
                return [[list(path), text] for path, text in error.faults]
        told = {
            "plain": found.plain(), "origin": str(found.origin),
            "alpha": slot("norm").build(found, 4).alpha.item(),
            "below": fault({"type": "dyt", "alpha": 0}),
            "unknown": fault({"type": "dyt", "alhpa": 1}),
            "name": fault("dty"),
            "nested": slot("attention").resolve({"type": "fused", "qk_norm": "dyt"}).plain()["qk_norm"],
            "components": [name for name in components("norm") if "dyt" in name],
        }
    """
    told = tell(tmp_path, script)["told"]
    assert told["plain"] == {"type": "dyt", "alpha": 2.0}
    assert (told["origin"], told["alpha"]) == ("acme-vit 1.2.0", 2.0)
    assert told["below"] == [[["alpha"], "norm 'dyt': alpha: input should be greater than 0; found 0"]]
    assert told["unknown"] == [[["alhpa"], "norm 'dyt' has no option 'alhpa'. Did you mean 'alpha'? Options: alpha."]]
    ((path, text),) = told["name"]
    assert path == ["type"] and text.startswith("no norm called 'dty'. Did you mean 'dyt'? Installed: dyt, ")
    assert told["nested"] == {"type": "dyt", "alpha": 0.5}
    assert told["components"] == ["dyt"]


def test_two_sources_of_one_name(tmp_path: Path) -> None:
    install(tmp_path, "acme_vit", "1.2.0", DYT, {"vitlab.norm": ["dyt = acme_vit:DyT"]})
    install(
        tmp_path,
        "other_vit",
        "0.1",
        DYT,
        {"vitlab.norm": ["dyt = other_vit:DyT", "layernorm = other_vit:DyT", "good = other_vit:DyT"]},
    )
    script = """
        def clash(name):
            try:
                slot("norm").find(name)
            except errors.ClashError as error:
                return str(error)
        from vitlab.testing import components
        told = {
            "guests": clash("dyt"), "built_in": clash("layernorm"),
            "acme": slot("norm").get("acme-vit:dyt").__module__, "other": slot("norm").get("other-vit:dyt").__module__,
            "vitlab": slot("norm").get("vitlab:layernorm").__module__, "good": slot("norm").get("good").__module__,
            "still": clash("dyt"), "components": [name for name in components("norm") if name.endswith("dyt")],
            "resolved": slot("norm").resolve("acme-vit:dyt").plain(),
        }
        try:
            slot("norm").resolve("dyt")
        except errors.OptionError as error:
            told["option"] = [[list(path), text] for path, text in error.faults]
        try:
            slot("norm").find("nobody:dyt")
        except errors.UnknownComponent as error:
            told["nobody"] = str(error)
    """
    told = tell(tmp_path, script)["told"]
    sentence = "norm 'dyt' is offered by acme-vit and other-vit; write 'acme-vit:dyt' or 'other-vit:dyt'."
    assert told["guests"] == told["still"] == sentence
    assert told["built_in"] == (
        "norm 'layernorm' is offered by other-vit and vitlab; write 'other-vit:layernorm' or 'vitlab:layernorm'."
    )
    assert (told["acme"], told["other"]) == ("acme_vit", "other_vit")
    assert (told["vitlab"], told["good"]) == ("vitlab.components.norm", "other_vit")
    assert told["components"] == ["acme-vit:dyt", "other-vit:dyt"]
    assert told["resolved"] == {"type": "acme-vit:dyt", "alpha": 0.5}
    assert told["option"] == [[["type"], sentence]]
    assert told["nobody"].startswith("no norm called 'nobody:dyt'.")


def test_a_broken_guest_is_broken_for_those_who_name_it(tmp_path: Path) -> None:
    install(
        tmp_path,
        "broken_vit",
        "0.3.1",
        "def first():\n    import a_module_that_is_not\nfirst()\n",
        {
            "vitlab.norm": ["broken = broken_vit:Norm", "half = broken_vit:Norm"],
            "vitlab.executor": ["cloud = broken_vit:X"],
        },
    )
    install(
        tmp_path,
        "wrong_vit",
        "2",
        "from torch import nn\nclass Wrong(nn.Module):\n    'No norm.'\ndef function(): ...\n",
        {"vitlab.norm": ["wrong = wrong_vit:Wrong", "function = wrong_vit:function", "gone = wrong_vit:Gone"]},
    )
    script = """
        def broken(name, room="norm"):
            try:
                slot(room).resolve(name)
            except errors.BrokenComponent as error:
                return str(error)
        told = {name: broken(name) for name in ("broken", "wrong", "function", "gone")}
        told["cloud"] = broken("cloud", "executor")
        told["others"] = slot("norm").resolve("layernorm").plain()
        told["local"] = slot("executor").resolve("local").plain()
        told["listed"] = [entry.name for entry in slots.listing("norm")]
    """
    told = tell(tmp_path, script)["told"]
    first = "norm 'broken' from broken-vit 0.3.1 failed to import: ModuleNotFoundError(\"No module named 'a_module_that_is_not'\")"
    assert told["broken"].splitlines()[0] == first
    assert "in first" in told["broken"] and "Traceback" in told["broken"]
    refused = " from wrong-vit 2 is not a Norm: norm components derive from vitlab.components.norm.Norm"
    assert told["wrong"] == "norm 'wrong'" + refused
    assert told["function"] == "norm 'function'" + refused
    assert "gone" in told["gone"] and "AttributeError" in told["gone"]
    assert "executor 'cloud' from broken-vit 0.3.1 failed to import" in told["cloud"]
    assert told["others"] == {"type": "layernorm", "eps": 1e-6}
    assert told["local"] == {"type": "local"}
    assert {"broken", "half", "wrong", "layernorm"} <= set(told["listed"])


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
    rooms.keep(monkeypatch, norm)


def write(file: Path, name: str = "halved", by: float = 0.5, after: str = "") -> Path:
    file.parent.mkdir(exist_ok=True)
    file.write_text(textwrap.dedent(FILE.format(name=name, by=by)) + after)
    return file


def test_a_file_registers_components_under_a_digest_of_its_code(tmp_path: Path) -> None:
    file = write(tmp_path / "my_blocks.py")
    origin = slots.load_file(file)
    assert origin.source == "my_blocks.py" and len(origin.version) == 16
    found = norm.resolve({"type": "halved", "by": 0.25})
    assert found.origin == origin
    assert norm.build(found, 4).by == 0.25  # type: ignore[attr-defined]
    assert norm.get("my_blocks.py:halved") is found.component
    (entry,) = [entry for entry in slots.listing("norm") if entry.name == "halved"]
    assert entry.origin == origin and entry.target.endswith(":Halved")
    assert slots.load_file(str(file)) == origin  # a second time is once
    with pytest.raises(OptionError, match=r"no option 'bye'. Did you mean 'by'"):
        norm.resolve({"type": "halved", "bye": 1})


def test_a_file_that_was_edited_is_read_again(tmp_path: Path) -> None:
    file = write(tmp_path / "my_blocks.py")
    first = slots.load_file(file)
    write(file, by=0.125)
    second = slots.load_file(file)
    assert second != first and second.source == first.source
    assert norm.resolve("halved").plain() == {"type": "halved", "by": 0.125}
    assert norm.resolve("halved").origin == second
    assert [entry.origin for entry in slots.listing("norm") if entry.name == "halved"] == [second]
    write(file, name="quartered")
    slots.load_file(file)
    assert "quartered" in norm.names() and "halved" not in norm.names()


def test_a_file_that_fails_leaves_nothing_behind_and_can_be_mended(tmp_path: Path) -> None:
    file = write(tmp_path / "my_blocks.py", after="\nraise RuntimeError('half way')\n")
    with pytest.raises(
        BrokenComponent, match=r"(?s)plugin file .*my_blocks.py failed: RuntimeError\('half way'\).*line"
    ):
        slots.load_file(file)
    assert "halved" not in norm.names()
    write(file)
    slots.load_file(file)
    assert norm.resolve("halved").plain() == {"type": "halved", "by": 0.5}


def test_an_edit_that_fails_keeps_what_was_there(tmp_path: Path) -> None:
    file = write(tmp_path / "my_blocks.py")
    first = slots.load_file(file)
    write(file, by=0.125, after="\nraise RuntimeError('half way')\n")
    with pytest.raises(BrokenComponent):
        slots.load_file(file)
    assert norm.resolve("halved").origin == first


def test_files_that_are_not_what_they_should_be(tmp_path: Path) -> None:
    with pytest.raises(BrokenComponent, match=r"no_such.py: No such file"):
        slots.load_file(tmp_path / "no_such.py")
    (tmp_path / "grammar.py").write_text("def (:\n")
    with pytest.raises(BrokenComponent, match="SyntaxError"):
        slots.load_file(tmp_path / "grammar.py")
    (tmp_path / "class.py").write_text(
        "from vitlab.components.norm import norm\n@norm.register('wrong')\nclass Wrong:\n    'No norm.'\n"
    )
    with pytest.raises(BrokenComponent, match=r"norm 'wrong' from class.py .* is not a Norm"):
        slots.load_file(tmp_path / "class.py")
    (tmp_path / "blocks.txt").write_text("x = 1\n")
    with pytest.raises(BrokenComponent, match=r"blocks.txt: the name of a Python file ends in .py"):
        slots.load_file(tmp_path / "blocks.txt")
    (tmp_path / "exits.py").write_text("import sys\nsys.exit('bye')\n")
    with pytest.raises(BrokenComponent, match="SystemExit"):
        slots.load_file(tmp_path / "exits.py")


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
@norm.register("called")
class Called(LayerNorm):
    '''An option that JSON Schema has no words for.'''
    def __init__(self, dim: int, *, by: nn.Module | None = None) -> None: ...
"""


def test_options_that_cannot_be_read_are_said_and_left_out_of_the_schema(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(ODD)
    slots.load_file(tmp_path / "odd.py")
    for name, words in {
        "typed": "Typed: its annotations cannot be read: .*'Decimal'",
        "bare": "Bare: option 'by' needs an annotation",
        "hidden": "Hidden: no option can be called '_by'",
    }.items():
        with pytest.raises(BrokenComponent, match=words):
            norm.resolve(name)
    names = study_schema()["$defs"]["slot.norm"]["anyOf"][0]["enum"]
    assert "layernorm" in names and not {"typed", "bare", "hidden", "called"} & set(names)


def test_two_files_of_one_name_and_component(tmp_path: Path) -> None:
    slots.load_file(write(tmp_path / "a" / "blocks.py"))
    with pytest.raises(ClashError, match=r"norm 'halved' is registered twice in blocks.py"):
        slots.load_file(write(tmp_path / "b" / "blocks.py", by=0.1))
    assert norm.resolve("halved").plain()["by"] == 0.5


def test_a_file_clashes_with_a_built_in_only_at_use(tmp_path: Path) -> None:
    slots.load_file(write(tmp_path / "blocks.py", name="rmsnorm"))
    with pytest.raises(ClashError, match=r"write 'blocks.py:rmsnorm' or 'vitlab:rmsnorm'"):
        norm.find("rmsnorm")
    assert norm.resolve("layernorm").origin.source == "vitlab"
    assert norm.get("vitlab:rmsnorm").__module__ == "vitlab.components.norm"


# -- the example ------------------------------------------------------------------------------------------------------

EXAMPLE = Path(__file__).parent.parent / "plugins" / "vitlab-example"


def test_the_example_is_a_distribution_of_its_own(tmp_path: Path) -> None:
    import tomllib

    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    ((group, points),) = project["entry-points"].items()
    ((name, target),) = points.items()
    module, _, cls = target.partition(":")
    assert group == "vitlab.position"
    install(
        tmp_path, module, project["version"], (EXAMPLE / f"{module}.py").read_text(), {group: [f"{name} = {target}"]}
    )
    script = f"""
        from vitlab.testing import check_component
        check_component("position", "{name}")
        told = [slot("position").get("{name}").__qualname__, str(slot("position").find("{name}")[1])]
    """
    assert tell(tmp_path, script)["told"] == [cls, f"{project['name']} {project['version']}"]
