"""Tests of the code digest: the modules it follows, and that it is of the loaded code."""

from __future__ import annotations

import importlib
import json
import os
import py_compile
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import slot_fixtures
import yaml

import vitlab
from vitlab import imports, lab, registry
from vitlab.components.mlp import mlp
from vitlab.data.datasets import dataset
from vitlab.data.prepare import prepare
from vitlab.errors import OptionError, Refused
from vitlab.identity import source
from vitlab.identity.code import clear_caches, component_modules, transitive_digests, trial_code_digest
from vitlab.lab import Answer
from vitlab.planning.values import Trial
from vitlab.registry.file_loader import load_file
from vitlab.spec import STREAMS

STUDY: dict[str, Any] = {
    "study": "code",
    "base": {
        "data": {"type": "digits"},
        "model": {"type": "vit", "patch_size": 4, "dim": 8, "depth": 1, "heads": 2},
        "train": {"steps": 3, "batch_size": 16, "evaluations": 1},
    },
    "analysis": {"compare": "none"},
    "seeds": 1,
    "run": {"executor": "inline", "tracker": "none", "engine": "loop"},
}
SCALED = """
from vitlab.components.mlp import GeluMLP, mlp
{imports}

@mlp.register("{name}")
class Scaled(GeluMLP):
    '''An MLP whose output is multiplied.'''

    def forward(self, x_BTD):
        return {scale} * super().forward(x_BTD)
"""


@pytest.fixture(autouse=True)
def forget_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make modules of ``tmp_path`` importable, and forget imports and registrations after the test."""
    slot_fixtures.keep(monkeypatch, mlp)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("vitlab.report.write", lambda *_: [])
    monkeypatch.setattr("vitlab.identity.code._inherited", {})  # as in drivers, which read files for every plan
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
    importlib.invalidate_caches()
    clear_caches()


def study(folder: Path, part: str | None = None, **run: Any) -> Path:
    model = {**STUDY["base"]["model"], **({} if part is None else {"mlp": part})}
    content = {**STUDY, "base": {**STUDY["base"], "model": model}, "run": {**STUDY["run"], **run}}
    file = folder / "study.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


def planned(file: Path, *plugins: Path) -> Trial:
    importlib.invalidate_caches()
    return lab.plan_study(file, plugins=plugins)[1].trials[0].trial


def loss(answer: Answer) -> float:
    return float(answer.results()["train/loss"].iloc[0])


def write(file: Path, text: str) -> Path:
    """Write a module like an editor, without notice to processes that imported it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    importlib.invalidate_caches()
    return file


# -- followed imports -------------------------------------------------------------------------------------------------


def test_digest_follows_helper_modules_of_plugin_file(tmp_path: Path) -> None:
    write(tmp_path / "mylab" / "__init__.py", "")
    helper = write(tmp_path / "mylab" / "layers.py", "from mylab.numbers import SCALE\nscaled = SCALE\n")
    numbers = write(tmp_path / "mylab" / "numbers.py", "SCALE = 1\n")
    plugin = write(
        tmp_path / "my_blocks.py",
        SCALED.format(imports="from mylab.layers import scaled", name="helped", scale="scaled"),
    )
    file = study(tmp_path, "helped", executor="local")
    digests = [planned(file, plugin)]
    write(helper, "from mylab.numbers import SCALE\nscaled = 2 * SCALE\n")
    digests.append(planned(file, plugin))
    write(numbers, "SCALE = 5\n")
    digests.append(planned(file, plugin))
    write(numbers, "SCALE = 5  # and a comment\n")
    digests.append(planned(file, plugin))
    assert len({trial.key for trial in digests}) == 1
    assert len({trial.code for trial in digests}) == 3 and digests[-1].code == digests[-2].code


def test_edited_helper_is_retrained_by_workers(tmp_path: Path) -> None:
    """Worker processes compute the digest again and would refuse another."""
    write(tmp_path / "workerlab.py", "SCALE = 1\n")
    plugin = write(
        tmp_path / "my_blocks.py", SCALED.format(imports="from workerlab import SCALE", name="worked", scale="SCALE")
    )
    file = study(tmp_path, "worked", executor="local", workers=1)

    def run() -> Answer:
        return vitlab.run(file, out=tmp_path / "out", plugins=[plugin])

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
        first, again = run(), run()
        write(tmp_path / "workerlab.py", "SCALE = 5\n")
        changed = run()
    assert [(one.trained, one.cached) for one in (first, again, changed)] == [(1, 0), (0, 1), (1, 0)]
    assert loss(first) != loss(changed)


def test_module_edited_within_a_second_is_compiled_again(tmp_path: Path) -> None:
    """Python's own check of bytecode compares sizes and whole seconds."""
    file = write(tmp_path / "quicklab.py", "SCALE = 1\n")
    second = 1_700_000_000 * 10**9
    os.utime(file, ns=(second, second))
    bytecode = py_compile.compile(str(file), doraise=True)
    os.utime(bytecode, ns=(second + 10**8, second + 10**8))
    write(file, "SCALE = 5\n")
    os.utime(file, ns=(second + 5 * 10**8, second + 5 * 10**8))
    assert importlib.import_module("quicklab").SCALE == 5


def test_patching_plugin_file_is_part_of_every_trial(tmp_path: Path, monkeypatch: Any) -> None:
    from vitlab.components.mlp import GeluMLP

    monkeypatch.setattr(GeluMLP, "forward", GeluMLP.forward)  # put back what the file patches
    patching = write(
        tmp_path / "patching.py",
        "from vitlab.components.mlp import GeluMLP\nwas = GeluMLP.forward\n"
        "GeluMLP.forward = lambda self, x: 0.1 * was(self, x)\n",
    )
    file = study(tmp_path)
    first = vitlab.run(file, out=tmp_path / "out")
    patched = vitlab.run(file, out=tmp_path / "out", plugins=[patching])
    assert (first.trained, patched.trained, patched.cached) == (1, 1, 0)
    assert loss(first) != loss(patched)
    # the patch and its results remain in this process
    after = vitlab.run(file, out=tmp_path / "out")
    assert (after.trained, after.cached) == (0, 1) and loss(after) == loss(patched)
    elsewhere = study(tmp_path, executor="local")
    assert planned(elsewhere).code == first.plan.trials[0].trial.code, "a worker has not loaded it"


def test_digest_follows_sister_packages_and_foreign_base_classes(tmp_path: Path) -> None:
    write(tmp_path / "acme_core" / "__init__.py", "from .parts import Base\n")
    base = write(
        tmp_path / "acme_core" / "parts.py",
        "from vitlab.components.mlp import GeluMLP\nfrom acme_numbers import SCALE\nclass Base(GeluMLP):\n    by = SCALE\n",
    )
    numbers = write(tmp_path / "acme_numbers.py", "SCALE = 1\n")
    write(
        tmp_path / "acme_made.py",
        "def make():\n    import importlib\n    return importlib.import_module('acme_hidden').Hidden\n",
    )
    hidden = write(tmp_path / "acme_hidden.py", "class Hidden:\n    by = 1\n")
    write(
        tmp_path / "acme_vit.py",
        "import acme_core\nimport acme_made\nfrom vitlab.components.mlp import mlp\n"
        "@mlp.register('acme')\nclass Acme(acme_made.make(), acme_core.Base):\n    '''An MLP.'''\n",
    )
    importlib.invalidate_caches()
    importlib.import_module("acme_vit")
    modules = component_modules([mlp.resolve_choice("acme")])
    assert {"acme_vit", "acme_core.parts", "acme_hidden", "acme_numbers"} <= set(transitive_digests(modules))

    def digest() -> str:
        clear_caches()
        return trial_code_digest(component_modules([mlp.resolve_choice("acme")]))

    digests = [digest()]
    for file in (base, numbers, hidden):
        write(file, file.read_text() + "extra = 1\n")
        digests.append(digest())
    assert len(set(digests)) == 4


def test_digest_follows_modules_behind_star_import(tmp_path: Path) -> None:
    write(tmp_path / "starry" / "__init__.py", "from .one import *\nfrom .two import *\nfrom .three import c\n")
    for number, name in (("one", "a"), ("two", "b"), ("three", "c")):
        write(tmp_path / "starry" / f"{number}.py", f"{name} = 1\n")
    write(tmp_path / "star_gazer.py", "from starry import *\n")
    assert {"starry.one", "starry.two", "starry.three"} <= set(transitive_digests(["star_gazer"]))


def test_digest_of_mutually_importing_packages_terminates(tmp_path: Path) -> None:
    write(tmp_path / "ring_a" / "__init__.py", "from ring_b import name\n")
    write(tmp_path / "ring_b" / "__init__.py", "from ring_a import name\n")
    write(tmp_path / "ring_user.py", "from ring_a import name\n")
    assert {"ring_user", "ring_a"} <= set(transitive_digests(["ring_user"]))


def install(site: Path, name: str, version: str, recorded: Mapping[str, Any] | None = None) -> Path:
    """Lay out a package and its metadata like pip, replacing an earlier version."""
    for old in site.glob(f"{name}-*.dist-info"):
        shutil.rmtree(old)
    info = site / f"{name}-{version}.dist-info"
    write(info / "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    write(info / "RECORD", f"{name}_pkg/__init__.py,sha256=x,1\n{name}-{version}.dist-info/METADATA,,\n")
    if recorded is not None:
        write(info / "direct_url.json", json.dumps(recorded))
    return write(site / f"{name}_pkg" / "__init__.py", "x = 1\n")


@pytest.mark.parametrize(
    ("recorded", "as_text"),
    [
        (None, False),
        ({"url": "https://example.org/base-1-py3-none-any.whl", "archive_info": {}}, False),
        ({"url": "file:///home/me/base", "dir_info": {}}, True),
        ({"url": "https://example.org/base.git", "vcs_info": {"vcs": "git"}}, True),
    ],
)
def test_installed_packages_count_by_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: Any, as_text: bool
) -> None:
    site = tmp_path / "site-packages"
    package = install(site, "base", "1.0", recorded)
    monkeypatch.syspath_prepend(site)
    write(tmp_path / "standing.py", "def f():\n    import base_pkg, torch, json, yaml\n    from PIL import Image\n")

    def digest() -> str:
        clear_caches()
        importlib.invalidate_caches()
        return trial_code_digest(frozenset({"standing"}))

    first = digest()
    assert set(transitive_digests({"standing"})) == {"standing", "base_pkg" if as_text else "base==1.0"}
    write(package, "x = 2\n")
    edited = digest()
    assert (edited != first) == as_text
    install(site, "base", "1.1", recorded)
    assert (digest() != first) != as_text, "another version of equal text, or another version"


def test_pinned_packages_are_requirements_of_vitlab() -> None:
    import tomllib
    from importlib.metadata import packages_distributions

    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    required = {canonicalize_name(Requirement(text).name) for text in project["dependencies"]}
    of = {package: {canonicalize_name(name) for name in names} for package, names in packages_distributions().items()}
    assert {name for package in source.PINNED for name in of[package]} >= required
    assert all(of[package] & required for package in source.PINNED - {"mlflow"}) and of["mlflow"]


def test_unparsable_text_counts_by_bytes(tmp_path: Path) -> None:
    write(tmp_path / "asker.py", "try:\n    import spoilt\nexcept SyntaxError:\n    pass\n")
    spoilt = write(tmp_path / "spoilt.py", "def (:\n")
    clear_caches()
    first = trial_code_digest(frozenset({"asker"}))
    write(spoilt, "def ):\n")
    clear_caches()
    assert trial_code_digest(frozenset({"asker"})) != first


# -- loaded code ------------------------------------------------------------------------------------------------------


def component(name: str, scale: int) -> str:
    return SCALED.format(imports=f"SCALE = {scale}", name=name, scale="SCALE")


def test_code_edited_after_import_is_not_run_inline(tmp_path: Path) -> None:
    """As in a notebook: results of old code must never be stored under the digest of the new text."""
    module = write(tmp_path / "noted.py", component("noted", 1))
    importlib.import_module("noted")
    write(module, component("noted", 555))
    file = study(tmp_path, "noted")
    with pytest.raises(Refused, match=r"noted.py was edited after this process had imported it; .* restart the kernel"):
        vitlab.run(file, out=tmp_path / "out")
    assert not list((tmp_path / "out").glob("trials/*/*/result.json"))
    importlib.reload(sys.modules["noted"])
    after = vitlab.run(file, out=tmp_path / "out")
    assert after.trained == 1


def test_reloaded_code_is_retrained(tmp_path: Path) -> None:
    module = write(tmp_path / "anew.py", component("anew", 1))
    importlib.import_module("anew")
    file = study(tmp_path, "anew")
    first = vitlab.run(file, out=tmp_path / "out")
    write(module, component("anew", 555))
    importlib.reload(sys.modules["anew"])
    second = vitlab.run(file, out=tmp_path / "out")
    assert (first.trained, second.trained, second.cached) == (1, 1, 0)
    assert loss(first) != loss(second)
    write(module, component("anew", 1))
    importlib.reload(sys.modules["anew"])
    third = vitlab.run(file, out=tmp_path / "out")
    assert (third.trained, third.cached) == (0, 1) and loss(third) == loss(first)


def test_reloaded_entry_point_gives_new_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "from vitlab.components.mlp import GeluMLP\nclass Part(GeluMLP):\n    '''An MLP.'''\n    by = {}\n"
    module = write(tmp_path / "pointed.py", text.format(1))
    mlp.add_component("pointed", importlib.import_module("pointed").Part, registry.Origin("pointed", "1"))
    assert mlp.resolve_choice("pointed").component.by == 1  # type: ignore[attr-defined]
    write(module, text.format(222))
    importlib.reload(sys.modules["pointed"])
    assert mlp.resolve_choice("pointed").component.by == 222  # type: ignore[attr-defined]


DATA = """
from vitlab.data.datasets.synthetic import Synthetic

class Shades(Synthetic):
    '''Images of noise.'''

    def read(self, split):
        images = super().read(split)
        return images._replace(x_NCHW=images.x_NCHW // {by})
"""


def test_reloaded_data_set_reads_images_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cached images of a data set belong to the code that read it."""
    slot_fixtures.keep(monkeypatch, dataset)
    module = write(tmp_path / "shades.py", DATA.format(by=1))
    dataset.add_component("shades", importlib.import_module("shades").Shades, registry.Origin("shades", "1"))
    seeds = dict.fromkeys(STREAMS, 0)

    def brightest() -> int:
        clear_caches()
        return int(prepare(dataset.resolve_choice({"type": "shades"}), seeds).train.pixels_MCHW.max())  # type: ignore[union-attr]

    assert brightest() > 10
    write(module, DATA.format(by=200))
    importlib.reload(sys.modules["shades"])
    assert brightest() <= 1


def test_names_imported_before_reload_are_not_run(tmp_path: Path) -> None:
    helper = write(tmp_path / "taken.py", "SCALE = 1\n")
    write(tmp_path / "taker.py", SCALED.format(imports="from taken import SCALE", name="taker", scale="SCALE"))
    importlib.import_module("taker")
    write(helper, "SCALE = 555\n")
    importlib.reload(sys.modules["taken"])
    file = study(tmp_path, "taker")
    with pytest.raises(Refused, match=r"taker.py has SCALE of taken from before that was reloaded; reload this file"):
        vitlab.run(file, out=tmp_path / "out")
    importlib.reload(sys.modules["taker"])
    assert vitlab.run(file, out=tmp_path / "out").trained == 1


def test_component_that_is_registered_later_is_found(tmp_path: Path) -> None:
    write(tmp_path / "later.py", component("later", 1))
    with pytest.raises(OptionError, match="no mlp called 'later'"):
        mlp.resolve_choice({"type": "later", "ratio": 2.0})
    importlib.import_module("later")
    assert mlp.resolve_choice({"type": "later", "ratio": 2.0}).component.__module__ == "later"


def test_comment_edited_after_import_changes_nothing(tmp_path: Path) -> None:
    module = write(tmp_path / "remarked.py", component("remarked", 1))
    importlib.import_module("remarked")
    file = study(tmp_path, "remarked")
    assert vitlab.run(file, out=tmp_path / "out").trained == 1
    write(module, component("remarked", 1) + "# a comment\n")
    assert vitlab.run(file, out=tmp_path / "out").cached == 1


def test_docstrings_of_a_plugin_file_are_not_part_of_its_origin(tmp_path: Path) -> None:
    documented = component("described", 1) + '\n\ndef half(x):\n    """DOC"""\n    return x / 2\n'
    origins = [
        load_file(write(tmp_path / "described.py", documented.replace("DOC", text))) for text in ("One.", "Two.")
    ]
    assert origins[0] == origins[1]
    assert load_file(write(tmp_path / "described.py", documented.replace("x / 2", "x / 3"))) != origins[0]


def test_loaded_code_continues_if_digest_is_known(tmp_path: Path) -> None:
    """As in workers forked before an edit of vitlab: trials planned before it still run."""
    module = write(tmp_path / "forked.py", component("forked", 1))
    importlib.import_module("forked")
    clear_caches()
    before = trial_code_digest(frozenset({"forked"}), reader=source.read_source_as_imported)
    assert before == trial_code_digest(frozenset({"forked"}))
    write(module, component("forked", 555))
    clear_caches()
    assert (
        trial_code_digest(frozenset({"forked"}), reader=source.read_source_as_imported)
        == before
        != trial_code_digest(frozenset({"forked"}))
    )


def test_edit_of_vitlab_does_not_disturb_running_study(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its driver plans again after every stage, and its workers are forked from a process started with the driver."""
    digest = transitive_digests({"vitlab.training.loop"})
    file = Path(sys.modules["vitlab.training.loop"].__file__ or "")
    monkeypatch.setattr(source, "file_stamp", lambda path: None if path == file else imports.file_stamp(path))
    clear_caches()
    assert (
        transitive_digests({"vitlab.training.loop"})
        == transitive_digests({"vitlab.training.loop"}, source.read_source_as_imported)
        == digest
    )
    assert transitive_digests({"vitlab.training.loop"}, source.read_current_source) != digest


def test_two_versions_of_plugin_file_are_distinguished(tmp_path: Path) -> None:
    """Inline, patches of an earlier version of the file remain active."""
    plugin = write(tmp_path / "twice.py", "x = 1\n")
    file = study(tmp_path)
    first = planned(file, plugin)
    write(plugin, "x = 22\n")
    second = planned(file, plugin)
    write(plugin, "x = 1\n")
    assert len({first.code, second.code, planned(file, plugin).code}) == 3 - 1 and first.code != second.code


def test_recursive_import_finders_terminate() -> None:
    class Asks:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
            return next(
                (
                    spec
                    for finder in sys.meta_path
                    if finder is not self and (spec := finder.find_spec(name, path, target)) is not None
                ),
                None,
            )

    asks = Asks()
    sys.meta_path.insert(0, asks)  # type: ignore[arg-type]
    try:
        assert importlib.util.find_spec("this_module_is_nowhere") is None
        assert importlib.util.find_spec("antigravity") is not None
    finally:
        sys.meta_path.remove(asks)  # type: ignore[arg-type]
    assert "vitlab.identity.trial" in imports.last_imports
