"""Tests of ``vitlab.plugin``: its names, what it imports, and that plugins, templates and guides use nothing else."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import vitlab
from vitlab import plugin
from vitlab.cli.new import write_plugin
from vitlab.components.base import Part
from vitlab.identity import source
from vitlab.identity.code import clear_caches, transitive_digests
from vitlab.registry import SLOT_MODULES, slot

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "pages" / "guides" / "plugin.md").read_text()


def imports_of(text: str) -> Iterator[str]:
    """Yield each module or name of vitlab that a source text imports, such as ``vitlab.plugin.Geometry``."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_internal(name: str) -> bool:
    """Return whether an import is of vitlab, and neither from the door nor a public name."""
    top, _, rest = name.partition(".")
    return top == "vitlab" and not (rest == "" or rest in vitlab.__all__ or rest.startswith("plugin"))


def code_blocks(page: Path) -> Iterator[str]:
    for indent, text in re.findall(r"(?ms)^( *)```python[^\n]*\n(.*?)^ *```$", page.read_text()):
        yield re.sub(rf"(?m)^{indent}", "", text)


def test_names_for_type_checkers_are_the_names_at_run_time() -> None:
    tree = ast.parse(Path(plugin.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    declared = {
        alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert sorted(declared) == sorted(plugin.__all__)
    for name, module in declared.items():
        home = importlib.import_module(module)
        expected = getattr(home, name, None) or importlib.import_module(f"{module}.{name}")
        assert getattr(plugin, name) is expected
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        plugin.nothing  # noqa: B018


def test_door_has_every_slot_and_contract() -> None:
    for name in SLOT_MODULES:
        assert getattr(plugin, name) is slot(name)
        contract = plugin.Replay if name == "tracker" else getattr(plugin, slot(name).contract.__name__)
        assert issubclass(contract, slot(name).contract)


def test_import_of_door_needs_no_torch() -> None:
    code = "import sys; from vitlab.plugin import Choice, Pick; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_page_lists_every_name_once() -> None:
    (section,) = re.findall(r"(?ms)^## The names\n(.*?)(?=^## |\Z)", PAGE)
    assert sorted(re.findall(r"`(\w+)`", section)) == sorted([*plugin.__all__])


@pytest.mark.parametrize(
    "file",
    [*(ROOT / "plugins").glob("*/*.py"), *(ROOT / "plugins").glob("*/tests/*.py")],
    ids=lambda file: file.name,
)
def test_shipped_plugins_use_the_door(file: Path) -> None:
    internal = [name for name in imports_of(file.read_text()) if is_internal(name)]
    if file.parent.name == "tests":  # the tests look into runs of studies, too
        internal = [name for name in internal if name.startswith("vitlab.testing")]
    assert not internal


def test_templates_and_pages_use_the_door(tmp_path: Path) -> None:
    texts = [
        file.read_text()
        for kind in SLOT_MODULES
        for file in write_plugin(f"acme-{kind}", kind, out=tmp_path).rglob("*.py")
    ]
    pages = [*(ROOT / "docs" / "pages").rglob("*.md"), ROOT / "plugins" / "README.md", ROOT / "README.md"]
    pages.remove(ROOT / "docs" / "pages" / "reference" / "python.md")  # which has signatures
    texts += [block for page in pages for block in code_blocks(page)]
    assert len(texts) > 50
    assert not [name for text in texts for name in imports_of(text) if is_internal(name)]


CALLED = {
    "model": set(),
    "attention": {"block_index"},
    "position": {"overrides"},
    "block": {"add_part", "attn", "mlp", "norm1", "norm2", "drop_path1", "drop_path2", "ls1", "ls2"},
    "objective": {"name"},
    "metric": {"name", "of_features"},
    "engine": {"train_step", "evaluate", "trainings"},
    "executor": {"worker_environment"},
    "tracker": {
        *(
            "close",
            "deliver",
            "marks",
            "sync",
            "trial_folder",
            "trials",
            "reason_to_confirm",
            "count_undelivered",
            "update",
            "warn",
        ),
    },
}
"""Names of contracts that a component calls or has, and that nobody overrides."""


def public_names(contract: type) -> set[str]:
    """Return the public attributes of a contract, without those of torch."""
    bases = [base for base in contract.__mro__ if base.__module__.startswith("vitlab")]
    names = {name for base in bases for name in (*vars(base), *getattr(base, "__annotations__", {}))}
    return {name for name in names if not name.startswith("_")}


def test_page_of_plugins_has_every_hook_and_no_other() -> None:
    page = (ROOT / "plugins" / "README.md").read_text()
    rows = re.findall(r"(?m)^\| (?:`(\w+)`|every part) \| (?:`(\w+)`)? ?\|[^|]*\| (.*) \|$", page)
    hooks = {name: set(re.findall(r"`(\w+)`", cells)) for name, _, cells in rows if cells.strip("| ") or name}
    assert set(hooks) == {*SLOT_MODULES, ""}
    parts = {name for name in SLOT_MODULES if issubclass(slot(name).contract, Part)}
    wrong = {}
    for name, contract, _ in rows:
        if name:
            every = public_names(getattr(plugin, contract)) - CALLED.get(name, set())
            wrong[name] = (hooks[name] - {"__call__"} | (hooks[""] if name in parts else set())) ^ every
    assert not any(wrong.values()), {name: names for name, names in wrong.items() if names}


def test_code_of_a_component_has_the_modules_behind_the_door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "through_names.py").write_text("from vitlab.plugin import noise, rotate\n")
    (tmp_path / "through_module.py").write_text("import vitlab.plugin\n")
    clear_caches()
    by_names = transitive_digests({"through_names"}, source.read_current_source)
    assert {"vitlab.noise", "vitlab.components.attention"} <= set(by_names)
    assert not {"vitlab.plugin", "vitlab.executors.base"} & set(by_names), "neither the door nor what is not used"
    assert {"vitlab.noise", "vitlab.executors.base"} <= set(
        transitive_digests({"through_module"}, source.read_current_source)
    )
