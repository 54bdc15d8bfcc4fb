"""Tests of ``vitlab new plugin``: the package installs, passes its contract test, and has a study that runs."""

from __future__ import annotations

import errno
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
import yaml
from click.testing import CliRunner

import vitlab
from vitlab import noise, registry
from vitlab.cli import cli
from vitlab.cli.new import TEMPLATES, write_plugin
from vitlab.errors import UserError
from vitlab.spec import read_document

OWN = ("position", "dataset")


def lay_down(package: Path, site: Path) -> None:
    """Install a generated package like pip, by its ``pyproject.toml``."""
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    shutil.copytree(package / "src", site, dirs_exist_ok=True)
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    needs = "".join(f"Requires-Dist: {requirement}\n" for requirement in project["dependencies"])
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n{needs}"
    )
    groups = project["entry-points"].items()
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in points.items()) for group, points in groups
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))


def python(code: str, site: Path, folder: Path) -> str:
    """Return the output of a separate process with the installed packages."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(site),
        "OMP_NUM_THREADS": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    done = warm.python(code, folder, environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def called(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli, list(words))
    text = str(done.exception) if isinstance(done.exception, UserError) else done.output
    return done.exit_code, text


@pytest.mark.slow
def test_generated_package_tests_validates_and_runs(tmp_path: Path) -> None:
    for slot in OWN:
        code, output = called("new", "plugin", f"acme-{slot}", "--slot", slot, "--out", str(tmp_path))
        assert code == 0 and f"cd {tmp_path / f'acme-{slot}'}" in output
        lay_down(tmp_path / f"acme-{slot}", tmp_path / "site")
    # One process for all, because importing torch takes most of the time.
    script = f"""
import pytest
from vitlab.cli import cli
folders = ["acme-" + slot for slot in {OWN!r}]
options = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib", "--rootdir=."]
assert pytest.main(options + [folder + "/tests" for folder in folders]) == 0
for folder in folders:
    cli.main(["validate", folder + "/studies/acme.yaml"], standalone_mode=False)
    cli.main(["run", "--smoke", folder + "/studies/acme.yaml", "--executor", "inline"], standalone_mode=False)
"""
    printed = python(script, tmp_path / "site", tmp_path)
    assert f"{len(OWN)} passed" in printed
    for slot in OWN:
        assert f"acme-{slot}/studies/acme.yaml: 2 arms, 20 trials\n2 combinations of components ran two" in printed


@pytest.mark.slow
def test_other_templates_pass_contract_and_have_valid_studies(tmp_path: Path) -> None:
    others = [slot for slot in registry.SLOT_MODULES if slot not in OWN]
    for slot in others:
        lay_down(write_plugin(f"acme-{slot}", slot, out=tmp_path), tmp_path / "site")
    script = f"""
from vitlab import lab, registry
from vitlab.driver.smoke import run_smoke_test
from vitlab.testing import check_component
for slot in {others!r}:
    if slot != "executor":  # whose contract tests/test_executor_contract.py goes through, with lighter processes
        check_component(slot, "acme")
    assert str(registry.slot(slot).find("acme")[1]) == f"acme-{{slot}} 0.1.0"
    _, plan = lab.plan_study(f"acme-{{slot}}/studies/acme.yaml")
    print(slot, len(plan.arms), sum(bool(arm.skip) for arm in plan.arms))
print("ran", run_smoke_test("acme-executor/studies/acme.yaml", out="runs", changes=dict(design=None)))
"""
    printed = python(script, tmp_path / "site", tmp_path)
    assert printed.splitlines() == [*(f"{slot} 2 0" for slot in others), "ran 1"]


def generate(slot: str, folder: Path) -> type[Any]:
    """Import the class of a new package as an ordinary module."""
    package = write_plugin(f"acme-{slot}", slot, out=folder)
    file = package / "src" / f"acme_{slot}" / "__init__.py"
    spec = importlib.util.spec_from_file_location(f"acme_{slot}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    component: type[Any] = vars(module)[next(name for name in vars(module) if name.startswith("Acme"))]
    return component


def test_loss_template_is_polyloss(tmp_path: Path) -> None:
    logits_BK = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    target_B = torch.tensor([0, 3, 1, 1, 2])
    p_B = logits_BK.softmax(1)[torch.arange(5), target_B]
    formula = (-p_B.log() + 2 * (1 - p_B)).mean().item()
    loss = generate("loss", tmp_path)(epsilon=2.0)
    for target in (target_B, torch.nn.functional.one_hot(target_B, 4).double()):
        assert loss({"": logits_BK}, target).total.item() == pytest.approx(formula, rel=1e-12)


def test_schedule_template_is_warmup_constant_root_cooldown(tmp_path: Path) -> None:
    schedule = generate("schedule", tmp_path)(warmup=0.1, cooldown=0.5)
    factors = [schedule.factor(step, 100) for step in (0, 9, 10, 49, 50, 62, 99)]
    assert factors == pytest.approx([1 / 11, 10 / 11, 1, 1, 1, 1 - 0.24**0.5, 1 - 0.98**0.5])


def test_optimizer_template_is_nadam_with_decoupled_decay(tmp_path: Path) -> None:
    """The first step equals Dozat's algorithm 8 with gradient 1, whose corrected second moment is 1."""
    weight = torch.nn.Parameter(torch.ones(2, 2, dtype=torch.float64))
    optimizer = generate("optimizer", tmp_path)(lr=1e-3).build([{"params": [weight], "weight_decay": 0.5}])
    weight.sum().backward()
    optimizer.step()
    now, then = (0.9 * (1 - 0.5 * 0.96 ** (0.004 * step)) for step in (1, 2))
    momentum = then * 0.1 / (1 - now * then) + (1 - now) / (1 - now)
    expected = 1 - 1e-3 * 0.5 - 1e-3 * momentum
    torch.testing.assert_close(weight.detach(), torch.full((2, 2), expected, dtype=torch.float64), rtol=0, atol=1e-10)


def test_augment_template_inverts_a_quarter_of_images(tmp_path: Path) -> None:
    augment, id_B = generate("augment", tmp_path)(), torch.arange(64)
    x_BCHW = torch.randint(0, 256, (64, 1, 2, 2), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    y_BCHW = augment(x_BCHW, noise.key(0), id_B)
    inverted_B, kept_B = ((y_BCHW == expected).flatten(1).all(1) for expected in (255 - x_BCHW, x_BCHW))
    assert (inverted_B ^ kept_B).all() and 6 <= inverted_B.sum() <= 28  # binomial, far into both tails
    shares_BCHW = augment(x_BCHW / 255, noise.key(0), id_B)
    torch.testing.assert_close(shares_BCHW * 255, y_BCHW.float())


def test_metric_template_equals_scikit_learn(tmp_path: Path) -> None:
    from sklearn.metrics import matthews_corrcoef

    target_N = torch.randint(4, (60,), generator=torch.Generator().manual_seed(1))
    logits_NK = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    logits_NK += torch.nn.functional.one_hot(target_N, 4)
    metric = generate("metric", tmp_path)()
    rows_N = torch.cat([metric.rows(logits_NK[part], target_N[part]) for part in (slice(20), slice(20, 60))])
    expected = matthews_corrcoef(target_N, logits_NK.argmax(1))
    assert metric.value(rows_N) == pytest.approx(expected, rel=1e-12) and 0.1 < expected < 0.9


# -- package contents -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slot", ["executor", "tracker"])
def test_package_without_formula_names_none(slot: str, tmp_path: Path) -> None:
    package = write_plugin("acme-vit", slot, out=tmp_path)
    assert "formula" not in (text := (package / "README.md").read_text()) and "compares it" not in text
    tracker = read_document(package / "studies" / "acme.yaml").data["run"]["tracker"]
    assert tracker == ("none" if slot == "executor" else "acme")


@pytest.mark.parametrize("slot", registry.SLOT_MODULES)
def test_package_uses_names_consistently(slot: str, tmp_path: Path) -> None:
    package = write_plugin("acme-vit", slot, component="swirl_two", out=tmp_path)
    files = {str(file.relative_to(package)) for file in package.rglob("*") if file.is_file()}
    assert files == {
        "pyproject.toml", "README.md", ".gitignore", ".github/workflows/ci.yml", "src/acme_vit/__init__.py",
        "tests/test_swirl_two.py", "studies/swirl_two.yaml",
    }  # fmt: skip
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    source = (package / "src" / "acme_vit" / "__init__.py").read_text()
    (name,) = re.findall(r"(?m)^class (SwirlTwo\w+)\(", source)
    assert project["entry-points"] == {f"vitlab.{slot}": {"swirl_two": f"acme_vit:{name}"}} and "Reference: " in source
    major, minor = map(int, vitlab.__version__.split(".")[:2])
    assert project["dependencies"] == [f"vitlab>={major}.{minor},<{major}.{minor + 1}"]
    study = read_document(package / "studies" / "swirl_two.yaml").data
    assert study["plugins"] == {"require": ["acme-vit"]}
    if slot != "section":  # every report has it
        assert "swirl_two" in str([study[key] for key in ("base", "design", "run")])
    readme = (package / "README.md").read_text()
    assert f"| `studies/swirl_two.yaml` | a study: {study['question']} |" in readme and "this README" in readme
    steps = yaml.safe_load((package / ".github" / "workflows" / "ci.yml").read_text())["jobs"]["test"]["steps"]
    assert sum("studies/swirl_two.yaml" in step.get("run", "") for step in steps) == 2
    for file in files:
        text = (package / file).read_text()
        assert "NAME" not in text and "{{" not in text and text.endswith("\n") and not text.endswith("\n\n"), file
    for tool in (["check", "--select", "E,F,W,I,UP,B"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *tool, "--isolated", "--line-length=120", "--no-cache", str(package)]
        done = subprocess.run(ruff, capture_output=True, text=True, cwd=package)
        assert done.returncode == 0, done.stdout


def test_templates_are_package_data() -> None:
    """The declared package data matches every template."""
    root = Path(vitlab.__file__).parent
    declared = tomllib.loads((root.parent / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"][
        "vitlab"
    ]
    covered = {file for pattern in declared for file in root.glob(pattern)}
    templates = {file for file in TEMPLATES.rglob("*") if file.is_file()}
    assert templates <= covered and {
        file.name.partition(".")[0] for file in (TEMPLATES / "components").iterdir()
    } == set(registry.SLOT_MODULES)


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("Acme", "cannot be the name of a package"),
        ("acme_vit", "cannot be the name of a package"),
        ("../acme", "cannot be the name of a package"),
        ("/tmp/acme", "cannot be the name of a package"),
        ("acme vit", "cannot be the name of a package"),
        ("acme-", "cannot be the name of a package"),
        ("acme\n", "cannot be the name of a package"),
        ("a" * 61, "cannot be the name of a package"),
        ("torch", "would be imported as torch, which Python has already"),
        ("vitlab", "would be imported as vitlab, which Python has already"),
        ("class", "would be imported as class, which Python has already"),
        ("learned-vit", "there is a built-in position called 'learned'"),
        ("null-vit", "YAML would read the name 'null' as None"),
        ("if-vit", "cannot be the name of a component"),
    ],
)
def test_unusable_package_names_are_refused(name: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=sentence):
        write_plugin(name, "position", out=tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("component", ["../up", "a-b", "Upper", "a b", "", "x" * 41])
def test_unusable_component_names_are_refused(component: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be the name of a component"):
        write_plugin("acme-vit", "position", component=component, out=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_every_slot_has_exactly_one_template(tmp_path: Path) -> None:
    code, text = called("new", "plugin", "acme-vit", "--slot", "positon", "--out", str(tmp_path))
    assert code != 0 and text.startswith("no slot called 'positon'. Did you mean 'position'? Slots: ")
    assert len([*(TEMPLATES / "components").iterdir()]) == len(registry.SLOT_MODULES)


def test_existing_files_are_not_overwritten(tmp_path: Path) -> None:
    package = write_plugin("acme-vit", "norm", out=tmp_path)
    before = {file: file.read_bytes() for file in package.rglob("*") if file.is_file()}
    with pytest.raises(UserError, match="exists already and is not overwritten"):
        write_plugin("acme-vit", "position", out=tmp_path)
    (tmp_path / "acme-two").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match="exists already"):
        write_plugin("acme-two", "position", out=tmp_path)
    assert before == {file: file.read_bytes() for file in package.rglob("*") if file.is_file()}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["acme-two", "acme-vit"]


def test_unwritable_folder_gives_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="acme-vit: "):
        write_plugin("acme-vit", "norm", out=tmp_path / "file")


def test_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third file does not fit."""
    written, write = [0], Path.write_text

    def full(path: Path, *args: Any, **options: Any) -> int:
        written[0] += 1
        if written[0] == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write(path, *args, **options)

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(UserError, match="No space left on device; nothing is left"):
        write_plugin("acme-vit", "norm", out=tmp_path)
    assert written == [3] and not list(tmp_path.iterdir())
    assert write_plugin("acme-vit", "norm", out=tmp_path).is_dir()


# -- page of plugins --------------------------------------------------------------------------------------------------

PLUGINS = Path(__file__).parents[1] / "plugins"


def blocks(language: str) -> list[str]:
    fences = re.findall(r"(?ms)^ *```(\w*)\n(.*?)^ *```$", (PLUGINS / "README.md").read_text())
    return [text for language_of, text in fences if language_of == language]


def test_page_starts_with_generated_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands are run by the test above; here, they name generated files."""
    page = (PLUGINS / "README.md").read_text()
    (shell,) = blocks("sh")
    new, enter, *others = [line.partition("#")[0].strip() for line in shell.splitlines()]
    monkeypatch.chdir(tmp_path)
    assert called(*new.split()[1:])[0] == 0
    package = tmp_path / enter.removeprefix("cd ")
    words = {word for line in others for word in line.split() if word.endswith(".yaml")}
    words |= {file for file in re.findall(r"(?m)^\| `([^`]+)`", page) if "/" in file or "." in file} - {"test_acme.py"}
    assert words and all((package / file).is_file() for file in words)
    listed = re.search(r"`--slot` is any of (.*?);", page, re.DOTALL)
    assert listed and re.findall(r"`(\w+)`", listed.group(1)) == list(registry.SLOT_MODULES)


@pytest.mark.slow
def test_other_code_blocks_of_page_work(tmp_path: Path) -> None:
    example = PLUGINS / "vitlab-example"
    site = tmp_path / "site"
    (site / "vitlab_example-0.1.0.dist-info").mkdir(parents=True)
    shutil.copy(example / "vitlab_example.py", site)
    (site / "vitlab_example-0.1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: vitlab-example\nVersion: 0.1.0\n"
    )
    signature, check, file = (textwrap.dedent(block) for block in blocks("python"))
    (points,), (design,), (shell,) = blocks("toml"), blocks("yaml"), blocks("")
    declared = tomllib.loads((example / "pyproject.toml").read_text())["project"]["entry-points"]
    assert tomllib.loads(points)["project"]["entry-points"] == declared
    source = (example / "vitlab_example.py").read_text()
    for line in signature.replace(" ...", "").splitlines():
        assert line.rstrip().removesuffix('."""') in source, line
    (site / "vitlab_example-0.1.0.dist-info" / "entry_points.txt").write_text(
        "".join(
            f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in entries.items()) for group, entries in declared.items()
        )
    )
    base = {"data": {"type": "digits"}, "model": {"type": "vit", "patch_size": 4, "dim": 16, "depth": 1, "heads": 2}}
    study = {"study": "page", "base": {**base, "train": {"steps": 2, "batch_size": 4}}, **yaml.safe_load(design)}
    (tmp_path / "page.yaml").write_text(yaml.safe_dump(study))
    (tmp_path / "my_blocks.py").write_text(file)
    (tmp_path / "test_polar.py").write_text(check)
    commands = [line.partition("#")[0].split()[1:] for line in shell.splitlines() if line.startswith("vitlab ")]
    script = f"""
import runpy
from vitlab import lab, registry
from vitlab.cli import cli
for words in {commands!r}:
    cli.main(words, standalone_mode=False)
runpy.run_path("test_polar.py")["test_polar_passes_contract_test"]()
_, plan = lab.plan_study("page.yaml")
print("ARMS", [arm.name for arm in plan.arms])
registry.load_file("my_blocks.py")
print("FILE", registry.slot("position").get("my_blocks.py:polar").__name__)
"""
    printed = python(script, site, tmp_path)
    assert len(commands) == 3 and "temperature" in printed and "described by 'vitlab show position polar'" in printed
    assert "ARMS ['baseline', 'position=polar', 'position=polar(temperature=10)']" in printed, printed
    assert "FILE Polar" in printed
