"""Tests of plugin isolation: versions, exclusion, and one sentence for every fault."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import warm
from packaging.specifiers import SpecifierSet

from vitlab import __version__
from vitlab.registry import plugins

NORM = """
from torch import Tensor
from vitlab.components.norm import Norm

print("IMPORTED")

class Same(Norm):
    '''The identity.'''

    def __init__(self, dim: int) -> None:
        super().__init__()

    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD
"""

STUDY = """
study: guests
plugins: {require: %s}
base:
  data: {type: digits}
  model: {type: vit, patch_size: 4, dim: 8, depth: 1, heads: 2, norm: %s}
  train: {steps: 2, batch_size: 4}
"""


def install(
    site: Path, name: str, version: str, code: str, points: dict[str, list[str]], needs: str = "vitlab"
) -> None:
    """Lay out a distribution like pip."""
    site.mkdir(exist_ok=True)
    module = name.replace("-", "_")
    (site / f"{module}.py").write_text(code)
    info = site / f"{module}-{version}.dist-info"
    info.mkdir()
    head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (info / "METADATA").write_text(
        f"{head}Requires-Dist: torch\nRequires-Dist: {needs}\nRequires-Dist: vitlab>9; extra == 'x'\n"
    )
    groups = [f"[vitlab.{slot}]\n" + "".join(f"{line}\n" for line in lines) for slot, lines in points.items()]
    (info / "entry_points.txt").write_text("\n".join(groups))


def called(site: Path, *calls: list[str], after: str = "", **variables: str) -> list[dict[str, Any]]:
    """Run commands in one process with the installed plugins; return exit code, stdout and stderr of each."""
    script = f"""
import contextlib, io, json, sys
sys.argv[0] = "vitlab"
from vitlab import cli
told = []
for words in {list(calls)!r}:
    sys.argv[1:] = words
    code, out, err = 0, io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main()
        except SystemExit as exit_:
            code = exit_.code
    told.append({{"code": code, "out": out.getvalue(), "err": err.getvalue()}})
{after}
print(json.dumps(told))
"""
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", **variables}
    done = warm.python(script, site.parent, environment)
    assert done.returncode == 0, done.stderr
    results: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return results


def study(folder: Path, name: str, require: str = "[]", norm: str = "layernorm") -> list[str]:
    (folder / name).write_text(STUDY % (require, norm))
    return ["validate", name]


# -- versions ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_study_requires_plugin_versions(tmp_path: Path) -> None:
    install(tmp_path / "site", "acme-vit", "0.3.1", NORM, {"norm": ["same = acme_vit:Same"]})
    install(tmp_path / "site", "next-vit", "1.0rc1", NORM, {"norm": ["next = next_vit:Same"]}, needs="vitlab>=99")
    requirements = {
        "acme-vit": None,
        "acme-vit>=0.3,<1": None,
        "Acme_Vit == 0.3.*": None,
        "next-vit>=1": "this study needs next-vit>=1, and 1.0rc1 is installed: pip install 'next-vit>=1'",
        "next-vit": f"next-vit 1.0rc1 needs vitlab>=99, and this is {__version__}: upgrade one of the two",
        "acme-vit>=0.4": "this study needs acme-vit>=0.4, and 0.3.1 is installed: pip install 'acme-vit>=0.4'",
        "other-vit": "this study needs other-vit, which is not installed: pip install other-vit, or pip install -e FOLDER "
        "if it is your own",
        "other-vit>=2": "this study needs other-vit>=2, which is not installed: pip install 'other-vit>=2', or",
        "acme-vit>>1": "'acme-vit>>1' is not a requirement: write a name, or a name and its versions, such as acme-vit>=0.3,<1",
        "acme-vit @ file:///x": "'acme-vit @ file:///x' is not a requirement: write a name",
        "../x": "'../x' is not a requirement",
    }
    calls = [study(tmp_path, f"{n}.yaml", json.dumps([text])) for n, text in enumerate(requirements)]
    results = called(tmp_path / "site", *calls)
    for n, ((text, sentence), result) in enumerate(zip(requirements.items(), results, strict=True)):
        if sentence is None:
            assert result["code"] == 0 and "1 arm, 3 trials" in result["out"], (text, result)
        else:
            assert result["code"] == 2 and result["err"].startswith(f"{n}.yaml:3:21: {sentence}"), (text, result)
            assert result["err"].count("\n") == 3 and result["err"].endswith("^\n")


@pytest.mark.parametrize("specifier", [">=0.3,<1", "==1.*", "~=0.3", "!=0.3.1", ">1"])
@pytest.mark.parametrize("version", ["0.2.9", "0.3.1", "1.0", "2.0.dev1"])
def test_versions_compare_like_pip(specifier: str, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class FakeDistribution:
        name, requires = "acme-vit", None

        def __init__(self) -> None:
            self.version = version

    monkeypatch.setattr(plugins, "distribution", lambda name: FakeDistribution())
    fits = SpecifierSet(specifier, prereleases=True).contains(version)
    assert (plugins.why_requirement_unmet(f"acme-vit{specifier}") is None) == fits


# -- clashes ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_builtin_clash_leaves_default_studies_working(tmp_path: Path) -> None:
    """For components of any kind, the trials are those without the plugin."""
    site = tmp_path / "site"
    offered = {"norm": "layernorm", "position": "learned", "patch": "linear", "mlp": "gelu", "attention": "auto"}
    offered |= {"head": "linear", "init": "timm", "optimizer": "adamw", "schedule": "cosine", "loss": "cross_entropy"}
    offered |= {"metric": "accuracy", "executor": "local", "tracker": "mlflow"}
    points = {slot: [f"{name} = other_vit:Same"] for slot, name in offered.items()}
    install(site, "other-vit", "2", "raise RuntimeError('nobody has named it')\n", points)
    (tmp_path / "silent.yaml").write_text((STUDY % ("[]", "x")).replace(", norm: x", ""))
    plan = ["plan", "silent.yaml", "--json"]
    smoke = ["run", "silent.yaml", "--smoke", "--executor", "inline"]
    (without,), (beside, run) = called(tmp_path / "empty", plan), called(site, plan, smoke)
    assert beside["code"] == without["code"] == 0, beside["err"]
    keys, same = ([item["key"] for item in json.loads(result["out"])["trials"]] for result in (beside, without))
    assert keys == same and all(keys)
    assert run["code"] == 0, run["err"]


# -- messages ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_plugin_faults_are_reported_only_where_relevant(tmp_path: Path) -> None:
    site = tmp_path / "site"
    install(site, "acme-vit", "0.3.1", NORM, {"norm": ["same = acme_vit:Same"], "nothing": ["x = acme_vit:Same"]})
    install(site, "broken-vit", "1", "raise RuntimeError('no luck')\n", {"norm": ["broken = broken_vit:X"]})
    install(site, "exit-vit", "1", "raise SystemExit(0)\n", {"norm": ["exits = exit_vit:X"]})
    install(
        site, "new-vit", "3", "raise RuntimeError('never read')\n", {"norm": ["new = new_vit:X"]}, "vitlab>=99,<100"
    )
    install(site, "twin-vit", "1", NORM, {"norm": ["same = twin_vit:Same"]})
    install(site, "wrong-vit", "2", "class Wrong:\n    'No norm.'\n", {"norm": ["wrong = wrong_vit:Wrong"]})
    expected = {
        "broken": "norm 'broken' from broken-vit 1 failed to import: RuntimeError: no luck, at site/broken_vit.py:1",
        "exits": "norm 'exits' from exit-vit 1 failed to import: SystemExit: 0, at site/exit_vit.py:1",
        "new": f"norm 'new' cannot be used: new-vit 3 needs vitlab>=99,<100, and this is {__version__}: upgrade one of the two",
        "same": "norm 'same' is offered by acme-vit and twin-vit; write 'acme-vit:same' or 'twin-vit:same'.",
        "wrong": "norm 'wrong' (site/wrong_vit.py:1) is no Norm: norm components derive from vitlab.plugin.Norm",
    }
    calls = [study(tmp_path, f"{name}.yaml", norm=name) for name in expected]
    fine, *results, listed, plugins, strict, rows = called(
        site, study(tmp_path, "fine.yaml"), *calls, ["list", "norm"], ["plugins"], ["plugins", "--strict"],
        ["plugins", "--json"]
    )  # fmt: skip
    assert fine["code"] == 0 and fine["err"] == ""
    for (name, sentence), result in zip(expected.items(), results, strict=True):
        assert result["code"] in (2, 3) and sentence in result["err"], (name, result)
        assert "Traceback" not in result["err"] and "frozen" not in result["err"], (name, result)
    assert all(name in listed["out"] for name in expected)
    assert "broken               broken-vit 1: described by 'vitlab show norm broken'\n" in listed["out"]
    assert plugins["code"] == 0
    table = {line.split()[1]: line for line in plugins["out"].splitlines() if line.startswith("  ")}
    assert f"acme-vit 0.3.1   {site}" in plugins["out"]
    assert table["broken"].endswith(expected["broken"]) and " broken: " in table["broken"]
    assert table["new"].split(None, 2)[2].startswith("refused: new-vit 3 needs vitlab>=99,<100, and this is")
    assert table["same"].endswith("works: acme-vit has one of that name: write twin-vit:same")
    assert table["wrong"].endswith(expected["wrong"])
    assert strict["code"] == 3 and "no luck" in strict["err"] and strict["err"].endswith("4 plugins do not load\n")
    health = {
        (row["plugin"], row["name"]): row["health"]
        for row in json.loads(rows["out"])
        if not row["plugin"].startswith("vitlab-")  # vitlab's own plugins, if installed
    }
    assert health == {
        ("acme-vit", "same"): "works", ("broken-vit", "broken"): "broken", ("exit-vit", "exits"): "broken",
        ("new-vit", "new"): "refused", ("twin-vit", "same"): "works", ("wrong-vit", "wrong"): "broken",
    }  # fmt: skip


@pytest.mark.slow
def test_leftover_installation_is_harmless(tmp_path: Path) -> None:
    """Entry points without metadata have no owner."""
    site = tmp_path / "site"
    install(site, "acme-vit", "0.3.1", NORM, {"norm": ["same = acme_vit:Same"]})
    install(site, "half-vit", "1", NORM, {"norm": ["half = half_vit:X"]})
    (site / "half_vit-1.dist-info" / "METADATA").unlink()
    valid, listed, plugins = called(site, study(tmp_path, "same.yaml", norm="same"), ["list", "norm"], ["plugins"])
    assert valid["code"] == 0, valid["err"]
    assert "acme-vit 0.3.1" in listed["out"] and "unknown unknown" in listed["out"] and plugins["code"] == 0


@pytest.mark.slow
def test_fifty_plugins_are_listed_without_import(tmp_path: Path) -> None:
    site = tmp_path / "site"
    for n in range(50):
        code = f"raise RuntimeError('imported {n}')\n"
        install(
            site,
            f"guest{n}-vit",
            "1",
            code,
            {"norm": [f"guest{n} = guest{n}_vit:X"], "head": [f"g{n} = guest{n}_vit:X"]},
        )
    after = "told.append({'code': [name for name in sys.modules if name.startswith('guest')], 'out': '', 'err': ''})"
    listed, of_norm, valid, none = called(
        site, ["list"], ["list", "norm", "--json"], study(tmp_path, "fine.yaml"), after=after
    )
    assert (listed["code"], of_norm["code"], valid["code"]) == (0, 0, 0)
    assert sum(row["name"].startswith("guest") for row in json.loads(of_norm["out"])) == 50 and "g49" in listed["out"]
    assert none["code"] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "words", "code_and_sentence"),
    [
        (
            NORM + "    def __new__(cls, *args): raise Boom('bang')\nclass Boom(BaseException): ...\n",
            ["validate", "--build"],
            (3, "bad.py:17: Boom: bang"),
        ),
    ],
)
def test_plugin_that_raises_anything_is_one_sentence(
    tmp_path: Path, code: str, words: list[str], code_and_sentence: tuple[int, str]
) -> None:
    bad = code.replace("class Same", "from vitlab.plugin import norm\n@norm.register('same')\nclass Same")
    (tmp_path / "bad.py").write_text(bad)
    study(tmp_path, "study.yaml", norm="same" if "--build" in words else "layernorm")
    command = [sys.executable, "-m", "vitlab", *words, "study.yaml", "--plugin", "bad.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr[: len(code_and_sentence[1])]) == code_and_sentence, done.stderr
    assert "Traceback" not in done.stderr
