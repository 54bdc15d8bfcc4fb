"""Tests of git revisions that run beside each other: worktrees, costs in turns, and ``vitlab ab``."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from click.testing import CliRunner
from scipy import stats

from vitlab.cli import cli
from vitlab.driver import benchmark
from vitlab.driver.session import Watch
from vitlab.errors import Interrupted, TrialFailed, UserError, VitlabError
from vitlab.regression import ab, cost
from vitlab.regression import checkout as revisions
from vitlab.regression.baseline import Facts, read_baseline
from vitlab.regression.checkout import Revision, checkout, resolve_commit, resolve_revisions
from vitlab.regression.decide import Finding
from vitlab.spec import Study
from vitlab.store.folders import Store

PART = '''
import torch
from vitlab.plugin import Geometry, Position, position


@position.register("own")
class Own(Position):
    """A bias of {value} on every token.  Reference: none."""

    def __init__(self, g: Geometry) -> None:
        super().__init__()

    def add(self, x_BTD: torch.Tensor, layer: int) -> torch.Tensor:
        """Return the tokens with the bias."""
        return x_BTD + {value}
'''
STUDY: dict[str, Any] = {
    "study": "own",
    "base": {
        "data": {"type": "synthetic", "image_size": 8, "train_images": 40, "test_images": 8, "validation": 0.2},
        "model": {"type": "vit", "patch_size": 4, "dim": 8, "depth": 1, "heads": 2, "position": "own"},
        "train": {"steps": 3, "batch_size": 16, "evaluations": 1},
    },
    "design": {"one_at_a_time": {"model.position": ["none"]}},
    "seeds": 3,
    "run": {"executor": "inline", "tracker": "none"},
}


def git(*words: str) -> str:
    return subprocess.run(["git", *words], check=True, capture_output=True, text=True).stdout


def commit(message: str) -> None:
    git("add", "-A")
    git("-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-q", "-m", message)


def vitlab(*words: str) -> Any:
    done = CliRunner().invoke(cli, [*words])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a repository with a study and a file of components, whose second commit changes it."""
    folder = tmp_path / "repository"
    folder.mkdir()
    monkeypatch.chdir(folder)
    git("init", "-q", "-b", "main")
    (folder / ".gitignore").write_text("vitlab-runs\n")
    (folder / "study.yaml").write_text(yaml.safe_dump(STUDY))
    for value in ("0.0", "0.5"):
        (folder / "own.py").write_text(PART.format(value=value))
        commit(f"a bias of {value}")
    return folder


def run_in_fork(self: Revision, *words: str, folder: Path | None = None) -> str:
    """Run a command of vitlab in a fork of this process, which need not import torch again."""
    assert words[:2] == ("-m", "vitlab")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.dup2(writer, 1)
            from vitlab import report

            report.write = lambda *_: []  # type: ignore[assignment]
            done = CliRunner().invoke(cli, [*words[2:]])
            os.write(writer, done.stdout_bytes)
            code = done.exit_code if not isinstance(done.exception, UserError) else 2
        finally:
            os._exit(code)
    os.close(writer)
    with open(reader, "rb") as stream:
        output = stream.read().decode()
    if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise (UserError if code == 2 else TrialFailed)(f"{self.name}: {code}")
    return output


# -- worktrees --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_revision_imports_its_own_package_and_entry_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repository: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The package has a src layout; here it is installed as pip does it for an editable one."""
    package = repository / "src" / "acme"
    package.mkdir(parents=True)
    project = "[build-system]\nrequires = ['setuptools']\nbuild-backend = 'setuptools.build_meta'\n[project]\nname = 'acme'\nversion = '1'\n[project.entry-points.'vitlab.position']\n"
    for name in ("before", "after"):
        (package / "__init__.py").write_text(f"NAME = '{name}'")
        (repository / "pyproject.toml").write_text(f"{project}{name} = 'acme:NAME'")
        commit(name)
    site = tmp_path / "site" / "acme-1.dist-info"
    site.mkdir(parents=True)
    (site / "METADATA").write_text("Name: acme\nVersion: 1\n")
    (site / "direct_url.json").write_text(json.dumps({"url": repository.as_uri(), "dir_info": {"editable": True}}))
    (site / "entry_points.txt").write_text("[vitlab.position]\nafter = acme:NAME\n")
    monkeypatch.syspath_prepend(site.parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site.parent), str(repository / "src")]))
    monkeypatch.setenv("PIP_NO_BUILD_ISOLATION", "0")  # no network
    program = (
        "import acme; from importlib.metadata import entry_points;"
        "print(acme.NAME, [point.name for point in entry_points(group='vitlab.position') if point.dist.name == 'acme'])"
    )
    assert Revision("here").run_python("-c", program) == "after ['after']\n"
    with checkout(resolve_commit("HEAD~"), "base", tmp_path / "out") as base:
        assert base.run_python("-c", program) == "before ['before']\n"
        (tmp_path / "elsewhere" / "acme").mkdir(parents=True)
        (tmp_path / "elsewhere" / "acme" / "__init__.py").write_text("")
        with pytest.raises(UserError, match="exit code 2"):
            base.run_python("-c", revisions.IMPORT_CHECK, str(tmp_path / "elsewhere"))
    assert "acme/__init__.py is imported instead of" in capfd.readouterr().err
    assert len(git("worktree", "list").splitlines()) == 1 and not [*(tmp_path / "out" / "revisions").iterdir()]


def test_worktree_leaves_the_index_and_other_worktrees_of_the_user_alone(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hook of git has the index of its worktree in a variable; a worktree may be on a disk that is not here now."""
    git("worktree", "add", "--detach", str(tmp_path / "disk"), "HEAD")
    (tmp_path / "disk").rename(tmp_path / "away")
    Path("own.py").write_text("staged")
    git("add", "own.py")
    staged = git("status", "--short")
    monkeypatch.setenv("GIT_INDEX_FILE", str(repository / ".git" / "index"))
    monkeypatch.setenv("GIT_DIR", str(repository / ".git"))
    with checkout(resolve_commit("HEAD~"), "base", tmp_path / "out", [Path("own.py")]) as base:
        assert base.plugins[0].read_text() == PART.format(value="0.0")
        names = base.run_python("-c", "import os; print([name for name in os.environ if name.startswith('GIT_')])")
        assert "GIT_INDEX_FILE" not in names and "GIT_DIR" not in names
    assert git("status", "--short") == staged == "M  own.py\n"
    assert len(git("worktree", "list").splitlines()) == 2


def test_worktree_of_a_killed_process_is_removed_by_the_next_one(repository: Path, tmp_path: Path) -> None:
    out, kept = tmp_path / "out", tmp_path / "kept"
    left = out / "revisions" / "left"
    for folder in (left, kept):
        git("worktree", "add", "--detach", str(folder / "tree"), "HEAD")
        (folder / "lock").touch()
    (out / "revisions" / "link").symlink_to(kept)
    (out / "revisions" / "other").mkdir()
    (out / "revisions" / "other" / "lock").symlink_to(kept / "lock")
    with checkout(resolve_commit("HEAD~"), "base", out, [Path("own.py")]) as first:
        assert not left.exists() and len(git("worktree", "list").splitlines()) == 3
        with checkout(resolve_commit("HEAD"), "head", out, [Path("own.py")]):
            assert Path(first.plugins[0]).exists(), "its process lives"
    assert len(git("worktree", "list").splitlines()) == 2 and (kept / "tree").is_dir(), "links are not followed"


def test_installed_wheel_of_the_repository_is_no_package_of_its_commits(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wheels are not committed, so no worktree has one."""
    site = tmp_path / "site" / "acme-1.dist-info"
    site.mkdir(parents=True)
    (site / "METADATA").write_text("Name: acme\nVersion: 1\n")
    (site / "direct_url.json").write_text(
        json.dumps({"url": f"{repository.as_uri()}/dist/acme.whl", "archive_info": {}})
    )
    monkeypatch.syspath_prepend(site.parent)
    with pytest.raises(UserError, match=r"nothing of .* is installed"), checkout(resolve_commit("HEAD"), "x", tmp_path):
        pass


def test_commits_that_cannot_be_compared_are_refused(repository: Path, tmp_path: Path, monkeypatch: Any) -> None:
    (_, first), (name, second) = resolve_revisions("HEAD~..")
    assert (first, second) == (git("rev-parse", "HEAD~").strip(), git("rev-parse", "HEAD").strip())
    assert name == f"HEAD ({second[:7]})"
    for words, message in [
        ("main", "write BASE..HEAD"),
        ("main...HEAD", "write BASE..HEAD"),
        ("nowhere..HEAD", "no commit 'nowhere' is here.*fetch"),
    ]:
        with pytest.raises(UserError, match=message):
            resolve_revisions(words)
    with pytest.raises(UserError, match=r"nothing of .* is installed"), checkout(second, "HEAD", tmp_path / "out"):
        pass
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))  # a checkout may be above it
    with pytest.raises(UserError, match="in no git repository"):
        resolve_commit("HEAD")


def test_failing_revision_is_named_with_its_exit_code() -> None:
    for code, own in ((2, 2), (3, 3), (4, 4), (1, 4), (130, 130)):
        with pytest.raises(VitlabError, match=f"fails there, with exit code {code}") as failure:
            Revision("base").run_python("-c", f"import sys; sys.exit({code})", "--x", "--y")
        assert failure.value.exit_code == own


def test_plugin_that_a_commit_lacks_and_a_repository_without_commits_are_named_with_remedies(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("new.py").write_text("")
    with (
        pytest.raises(UserError, match=r"base has no new\.py; commit it"),
        checkout(resolve_commit("HEAD"), "base", tmp_path / "out", [Path("own.py"), Path("new.py")]),
    ):
        pass
    assert len(git("worktree", "list").splitlines()) == 1
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    git("init", "-q")
    for name in ("HEAD", "HEAD~", "main"):
        with pytest.raises(UserError, match="no commit yet; run 'git add'"):
            resolve_commit(name)


# -- costs ------------------------------------------------------------------------------------------------------------


class Measured(Revision):
    """A revision whose measurements are given."""

    def __init__(self, name: str, costs: Iterator[float], order: list[str]) -> None:
        super().__init__(name)
        object.__setattr__(self, "costs", costs)
        object.__setattr__(self, "order", order)

    def run_python(self, *words: str, folder: Path | None = None) -> str:
        self.order.append(self.name)  # type: ignore[attr-defined]
        return f"a plugin prints\n{json.dumps({'time': next(self.costs), 'memory': 2.0})}\n"  # type: ignore[attr-defined]


def judged_costs(old: Revision, new: Revision, watch: Watch | None = None, **limits: float) -> list[Finding]:
    study = Study.model_validate({**STUDY, "check": {"cost": limits}})
    return list(cost.measure_and_judge_costs(study, old, new, ["a"], {}, watch or Watch()))


def test_interval_of_ratio_is_of_sign_test() -> None:
    """Of 11 rounds, the second smallest ratio is the lower end: fewer than 2 of 11 coins fall heads in 0.6 %."""
    ratios = [1.3, 1.1, 1.2, 9.0, 1.25, 1.15, 1.22, 1.18, 0.2, 1.21, 1.19]
    order: list[str] = []
    old, new = Measured("old", itertools.repeat(3.0), order), Measured("new", iter([3 * x for x in ratios]), order)
    time, memory = judged_costs(old, new)
    assert stats.binom.cdf(1, 11, 0.5) < 0.05 / 4 < stats.binom.cdf(2, 11, 0.5)
    assert time.sentence == (
        "1.200 times as before (simultaneous 95 % interval 1.100 to 1.300, 11 rounds in turns)"
    ) and (time.check, time.verdict) == ("time", "pass")
    assert memory.sentence.startswith("1.000 times as before (simultaneous 95 % interval 1.000 to 1.000, 11 rounds")
    assert order == ["new", "old", "old", "new"] * 5 + ["new", "old"], "the order is not balanced"


def test_cost_has_regressed_if_its_whole_interval_is_above_the_limit() -> None:
    said: list[str] = []
    watch = Watch()
    watch.say = said.append  # type: ignore[method-assign]
    for ratios, verdict in (([1.4], "regressed"), ([1.1, 1.3], "inconclusive"), ([1.1], "pass")):
        old, new = Measured("old", itertools.repeat(1.0), []), Measured("new", itertools.cycle(ratios), [])
        time, memory = judged_costs(old, new, watch, time=1.2)
        assert (time.verdict, memory.verdict) == (verdict, "pass")
        assert ("which cannot tell; at most 1.2" in time.sentence) == (verdict == "inconclusive")
        assert time.sentence.endswith("at most 1.2 times is allowed") and "at most" not in memory.sentence
    assert said == ["cost: 11 rounds of 1 arm by old and new in turns"] * 3


def test_cost_is_measured_with_prerequisites(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmark, "BLOCK_S", 0.01)
    study = {
        **STUDY,
        "base": {**STUDY["base"], "model": {**STUDY["base"]["model"], "position": "none"}},
        "design": None,
    }
    study["base"]["init_from"] = {"trial": {**study["base"]}}
    Path("started.yaml").write_text(yaml.safe_dump(study))
    request = {"file": "started.yaml", "plugins": [], "changes": {}, "out": "vitlab-runs"}
    cost.measure_and_print("baseline", json.dumps(request))
    measured = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 0 < measured["time"] < 1 and measured["memory"] > 1 << 20
    assert not Path("vitlab-runs").exists(), "nothing is stored"


@pytest.fixture
def no_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the losses of first steps, which have their own tests."""
    facts = Facts(torch="1", processor="p", seeds=(0,), skipped={}, arms={})
    monkeypatch.setattr("vitlab.regression.check.compute_exact_facts", lambda *_: facts)


@pytest.mark.usefixtures("no_traces")
def test_check_limits_costs_beside_commit_of_baseline(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def judged(_: Study, old: Revision, new: Revision, arms: Sequence[str], *__: object) -> Iterator[Finding]:
        assert [Path(plugin).read_text() for plugin in old.plugins] == [PART.format(value="0.5")]
        assert arms == ["baseline", "position=none"] and new.plugins == (Path("own.py"),)
        yield Finding("baseline", "time", "regressed", "1.4 times as before")
        yield Finding("baseline", "memory", "pass")

    monkeypatch.setattr("vitlab.regression.check.measure_and_judge_costs", judged)
    words = ("check", "study.yaml", "--plugin", "own.py")
    Path("study.yaml").write_text(yaml.safe_dump({**STUDY, "check": {"cost": {"time": 1.2}}}))
    with pytest.raises(UserError, match=r"study.yaml: not committed, .* run 'git commit -a'"):
        vitlab(*words, "--accept", "--reason", "x", "--tier", "exact")
    commit("limit costs")
    assert vitlab(*words, "--accept", "--reason", "x", "--tier", "exact").exit_code == 0
    assert read_baseline(Path("study.baseline.yaml")).commit == git("rev-parse", "HEAD").strip()
    commit("the baseline")
    assert vitlab(*words, "--accept", "--reason", "y", "--tier", "exact").exit_code == 0, "only the baseline differs"
    Path("own.py").write_text(PART.format(value="0.7"))
    done = vitlab(*words, "--tier", "cost", "--junit", "cost.xml", "--json")
    findings = json.loads(done.stdout)["findings"]
    assert [(item["check"], item["verdict"]) for item in findings] == [("time", "regressed"), ("memory", "pass")]
    assert done.exit_code == 1 and "fetch-depth: 0" in vitlab(*words, "--workflow").stdout
    cases = [*ElementTree.parse("cost.xml").getroot()]
    assert [case.get("name") for case in cases] == ["time", "memory"]


@pytest.mark.usefixtures("no_traces")
def test_check_without_limits_or_commit_says_what_to_do(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("check", "study.yaml", "--plugin", "own.py", "--tier", "exact")
    assert vitlab(*words, "--accept", "--reason", "x").exit_code == 0
    with pytest.raises(UserError, match=r"study.yaml limits no cost; write check: \{cost: \{time: 1.2"):
        vitlab(*words[:-1], "cost")
    with pytest.raises(UserError, match=r"names no commit .* add it: vitlab check study.yaml .*own.py --accept"):
        vitlab(*words[:-1], "cost", "--set", "check={cost: {memory: 1.1}}")
    monkeypatch.setattr("vitlab.regression.check.compute_exact_facts", None)  # it is refused before any other tier
    with pytest.raises(UserError, match="names no commit"):
        vitlab(*words, "--tier", "cost", "--set", "check={cost: {memory: 1.1}}")


# -- ab ---------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ab_trains_and_compares_by_both_commits(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def judged(_: Study, old: Revision, new: Revision, arms: Sequence[str], *__: object) -> Iterator[Finding]:
        assert [Path(plugin).read_text() for plugin in (*old.plugins, *new.plugins)] == [
            PART.format(value=value) for value in ("0.0", "0.5")
        ]
        yield Finding(arms[0], "time", "pass", "1.100 times as before")

    monkeypatch.setattr(Revision, "run_python", run_in_fork)
    monkeypatch.setattr(ab, "measure_and_judge_costs", judged)
    words = ("ab", "HEAD~..HEAD", "study.yaml", "--plugin", "own.py")
    with_costs = (*words, "--set", "check={cost: {memory: 1.1}}")
    done = vitlab(*with_costs, "--json", "--junit", "ab.xml")
    result = json.loads(done.stdout)
    old, new = (f"{name} ({git('rev-parse', name)[:7]})" for name in ("HEAD~", "HEAD"))
    assert done.stderr.splitlines() == [
        f"checking out {old} and its packages",
        f"checking out {new} and its packages",
        f"{old}: planning",
        f"{new}: planning",
        "the diff reaches 2 of 2 arms: 6 trials by each commit",
        f"{old}: training",
        f"{new}: training",
    ]
    assert {(item["arm"], item["check"]) for item in result["findings"]} == {
        ("baseline", "val/accuracy"), ("baseline", "time"), ("position=none", "val/accuracy")
    }  # fmt: skip
    by_arm = {item["arm"]: item for item in result["findings"] if item["check"] == "val/accuracy"}
    # A file of components counts for every arm, as running it can have any effect.
    assert by_arm["position=none"]["sentence"].startswith("same: HEAD ") and by_arm["baseline"]["seconds"] > 0
    suite = ElementTree.parse("ab.xml").getroot()
    assert suite.get("tests") == "3" and done.exit_code == (1 if result["verdict"] == "regressed" else 0)
    store = Store(Path("vitlab-runs"))
    trained = {*Path("vitlab-runs").glob("trials/*/*/result.json")}
    assert len(trained) == 12, "three seeds of two arms, by two commits"
    page = vitlab(*with_costs, "--format", "md").stdout
    assert "baseline: time 1.100 times as before" in page
    assert "times as before" not in vitlab(*words, "--format", "md").stdout, "costs are measured where they are limited"
    assert "exploratory" not in page
    assert {*Path("vitlab-runs").glob("trials/*/*/result.json")} == trained, "trained twice"
    assert store.study("own-" + git("rev-parse", "HEAD").strip()[:7]).is_dir()


def test_ab_of_commits_that_differ_in_words_trains_nothing(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Revision, "run_python", run_in_fork)
    Path("README.md").write_text("A bias.")
    Path("own.py").write_text(PART.format(value="0.5") + "# a comment\n")
    commit("words")
    Path("own.py").write_text(PART.format(value="0.9"))
    for form in (["--format", "terminal"], ["--format", "md"], ["--json"]):
        done = vitlab("ab", "HEAD~..HEAD", "study.yaml", "--plugin", "own.py", *form)
        assert done.exit_code == 0 and "the diff does not reach it" in done.stdout
        assert "Uncommitted changes of own.py are in neither commit" in done.stdout
    assert json.loads(done.stdout)["report"]["answers"], "the verdicts and the report are one document"
    assert not Path("vitlab-runs/trials").exists()


@pytest.mark.slow
def test_ab_of_environments_with_other_versions_trains_every_arm_apart(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No digest of code covers torch, so neither is an arm out of reach, nor is a result shared."""

    def run(revision: Revision, *words: str) -> str:
        torch = "1" if revision.name.startswith("HEAD~") else "2"
        return json.dumps({"torch": torch}) if words[0] == "-c" else run_in_fork(revision, *words)

    monkeypatch.setattr(Revision, "run_python", run)
    monkeypatch.setattr(ab, "checkout", lambda *words: checkout(*words[:-1]))  # the environments are those here
    Path("README.md").write_text("A bias.")
    commit("words")
    done = vitlab("ab", "HEAD~..HEAD", "study.yaml", "--plugin", "own.py", "--install", ".", "--format", "md")
    assert "does not reach" not in done.stdout and "was trained under torch 1, and HEAD" in done.stdout
    folders = [*Path("vitlab-runs/versions").iterdir()]
    assert [len([*folder.glob("trials/*/*/result.json")]) for folder in folders] == [6, 6]


def test_ab_names_the_revision_that_cannot_run_the_study(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Revision, "run_python", run_in_fork)
    git("mv", "own.py", "other.py")
    commit("renamed")
    with pytest.raises(UserError, match=r"HEAD~ \(\w{7}\) has no other\.py; commit it, then take commits that have it"):
        vitlab("ab", "HEAD~..HEAD", "study.yaml", "--plugin", "other.py")
    Path("other.py").write_text("raise RuntimeError")
    commit("broken")
    with pytest.raises(VitlabError, match=r"HEAD \(\w{7}\): \d"):
        vitlab("ab", "HEAD~..HEAD", "study.yaml", "--plugin", "other.py")
    with pytest.raises(UserError, match="has 'tune'"):
        vitlab("ab", "HEAD~..HEAD", "study.yaml", "--set", "tune={knobs: {train.optimizer.lr: [0.1, 0.2]}}")


def test_ab_that_is_stopped_says_that_it_resumes(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(Revision, "run_python", stop)
    with pytest.raises(Interrupted, match="the same command goes on"):
        vitlab("ab", "HEAD~..HEAD", "study.yaml", "--plugin", "own.py")


def test_workflow_of_ab_runs_ab(repository: Path) -> None:
    words = ("--set", "question=worse: #1?", "--plugin", "own.py")  # two signs of YAML
    text = vitlab("ab", "main..HEAD", "study.yaml", *words, "--workflow").stdout
    job = yaml.safe_load(text)["jobs"]["ab"]
    assert job["env"]["BASE"] == "${{ github.base_ref }}"
    (step,) = [step["run"] for step in job["steps"] if "vitlab ab" in step.get("run", "")]
    assert "vitlab plugins --strict" in [step.get("run") for step in job["steps"]]
    assert shlex.split(step) == ["vitlab", "ab", "origin/$BASE..HEAD", "study.yaml", *words, "--junit", "ab.xml"]
    assert [step["with"]["fetch-depth"] for step in job["steps"] if "checkout" in step.get("uses", "")] == [0]
