"""The folder of a study: its plan, the file it was made of, and the same of earlier versions.

A version is the content of a study file, with the changes of the command line, that was run.

``studies/<name>/`` holds the latest version, ``studies/<name>/versions/<version>/`` every earlier one, as the same
files: ``plan.json``, ``study.yaml``, ``changes.json``, ``run.json`` (time, file, folder and commit) and ``report/``.
A version is named by a digest of the content, without code, ``run`` and the location of data.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vitlab.errors import SpecError, UserError, list_some
from vitlab.identity.trial import hash_of
from vitlab.imports import INSTALLED
from vitlab.planning.registration import with_first_registration
from vitlab.planning.values import UNDECIDED, Decisions, Plan
from vitlab.registry import slot
from vitlab.spec import Choice, Document, RunSpec, Study, read_study
from vitlab.spec.changes import without_secrets
from vitlab.spec.tree import NewTree, Tree, Values, flatten, type_adapter
from vitlab.store.files import (
    Damaged,
    json_parser,
    parse_json,
    read_json,
    read_stored,
    read_stored_strictly,
    require_mapping,
    write_bytes,
    write_json,
)
from vitlab.store.folders import Store

EARLIER = "versions"
FILES = ("study.yaml", "changes.json", "run.json", "plan.json")
"""Files of a version; the plan is last, because a folder without a plan is not a version."""
NOT_CONTENT = ("run", "check")  #: keys of a study file that neither results nor reports depend on
GIT = ("git", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null")
"""Git without hooks: a repository may come from other people, and its configuration names programs."""
MAX_DIFFERENCES = 8  #: largest number of differences that are listed


# -- plan.json --------------------------------------------------------------------------------------------------------


def read_plan(file: Path) -> Plan | None:
    """Return the plan in a file, or None if there is no file.

    Raises:
        UserError: if the file is not a plan, or one in another format.
    """
    try:
        return read_stored_strictly(file, _parse_and_check_plan)
    except Damaged as error:
        raise UserError(
            f"{file} is damaged or in another format ({error}); 'vitlab run' sets it aside, plans the study again, and "
            "keeps every result"
        ) from None


def read_decisions(store: Store, study: Study) -> Decisions:
    """Return the decisions of earlier runs of a study; none if the study asks for none or has not been run."""
    if study.tune is None and study.run.engine != "measured" and len(study.seeds.looks) == 1:
        return UNDECIDED
    plan = read_stored(store.study(study.study) / "plan.json", _parse_and_check_plan)
    if plan is None:
        return UNDECIDED
    tunings = {tuning.key: tuning for tuning in plan.tuning if not tuning.open}
    trained = tuple(trial for trial in plan.prerequisites if store.folder(trial).done())
    return Decisions(tunings, plan.probes if study.run.engine == "measured" else {}, plan.looks, trained)


def apply_registration(plan: Plan, store: Store) -> Plan:
    """Return the plan with the analysis registered at the first run."""
    file = store.study(plan.study) / "plan.json"
    earlier = read_stored(file, _parse_and_check_plan)
    return with_first_registration(plan, earlier, lambda trial: store.folder(trial).done())


def write_registered_plan(plan: Plan, store: Store) -> Plan:
    """Write the plan and return it as :func:`apply_registration` does."""
    plan = apply_registration(plan, store)
    write_json(store.study(plan.study) / "plan.json", plan.to_json())
    return plan


def _parse_and_check_plan(file: Path) -> Plan:
    """Parse a plan, and check that its study is the folder's."""
    plan = Plan.from_json(parse_json(file.read_bytes()))
    if file.parent.parent.name == "studies" and plan.study != file.parent.name:
        raise ValueError(f"it is the plan of study {plan.study[:100]!r}")
    return plan


# -- versions ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunRecord:
    """The circumstances of a run, as in run.json."""

    version: str = ""
    time: float = 0.0  #: in seconds since 1970
    file: str = ""
    folder: str = ""
    plugins: tuple[str, ...] = ()
    commit: str = ""


@dataclass(frozen=True)
class Version:
    """One version of a study, as it was run."""

    folder: Path
    name: str  #: its digest
    content: Tree | None  #: see :func:`select_result_content`; None if the file is missing or cannot be read
    changes: Values  #: ``--set``
    run: RunRecord

    @property
    def time(self) -> float:
        """Time of the last run, in seconds since 1970."""
        return self.run.time or (self.folder / "plan.json").stat().st_mtime

    @property
    def when(self) -> str:
        """Time of the version in UTC."""
        return datetime.fromtimestamp(self.time, UTC).strftime("%Y-%m-%d %H:%M UTC")

    @property
    def set_options_text(self) -> str:
        """The changes of the command line as ``--set`` options, without changes of ``run`` and ``check``."""
        return " ".join(
            f"--set {shlex.quote(f'{path}={value if isinstance(value, str) else json.dumps(value)}')}"
            for path, value in self.changes.items()
            if path.partition(".")[0] not in NOT_CONTENT
        )


def select_result_content(data: Tree) -> NewTree:
    """Return the content of a study file on which its results and its report depend."""
    return {name: _canonical_content(value) for name, value in data.items() if name not in NOT_CONTENT}


def read_study_content(file: Path, changes: Values) -> NewTree:
    """Return the content of a study file, with changes.

    Raises:
        SpecError: if the file cannot be read as a study.
    """
    return select_result_content(_read_study_or_raise(file, changes)[1].data)


def _read_study_or_raise(file: Path, changes: Values) -> tuple[Study, Document]:
    study, document, problems = read_study(file, changes)
    if study is None or problems:
        raise SpecError(problems)
    return study, document


def version_name(content: Tree) -> str:
    """Return the name of the version that has this content."""
    return hash_of(json.loads(json.dumps(content, default=str)))[:16]


def read_versions(folder: Path) -> list[Version]:
    """Return the versions of the study in a folder: the latest first, then the earlier ones by time."""
    latest = _read_version_folder(folder)
    earlier = list(filter(None, map(_read_version_folder, (folder / EARLIER).glob("*"))))
    others = [candidate for candidate in earlier if latest is None or candidate.name != latest.name]
    return [*filter(None, [latest]), *sorted(others, key=lambda version: -version.time)]


def version_folder(study: Path, name: str) -> Path:
    """Return the folder of a version of the study; the study's own folder for the latest."""
    earlier = study / EARLIER / name
    return earlier if name and (earlier / "plan.json").exists() else study


def read_version(study: Path, name: str) -> Version | None:
    """Return a version of the study in a folder, the latest if it has no name; None where it has not been run."""
    return _read_version_folder(version_folder(study, name))


def archive_latest_unless_same(study: Path, new: str) -> Version | None:
    """Move the latest version of a study to the earlier ones, unless ``new`` is the same; return it."""
    latest = _read_version_folder(study)
    if latest is None or latest.name == new:
        return latest
    folder = study / EARLIER / latest.name
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        if (study / name).exists():
            write_bytes(folder / name, (study / name).read_bytes())
    shutil.rmtree(folder / "report", ignore_errors=True)
    with suppress(OSError):  # without a report; it can be made from the trials
        os.replace(study / "report", folder / "report")
    return latest


def write_study_files(
    plan: Plan,
    store: Store,
    file: str | Path,
    changes: Values,
    plugins: Sequence[str | Path],
    say: Callable[[str], None],
    *,
    trains: bool,
) -> Plan:
    """Write the files of a study at the start of a run and return the plan as :func:`write_registered_plan` does.

    If the last run was of another version of the study, that version is kept, and ``say`` is called with the
    differences.  Unless the run ``trains``, files that are current are left as they are, with the time of their run, so
    that the stored report stays current, too.
    """
    if not trains and _are_study_files_current(plan, store, file, changes, plugins):
        return apply_registration(plan, store)
    folder = store.study(plan.study)
    record = _make_run_record(folder, plan, file, plugins, time.time())
    latest = archive_latest_unless_same(folder, plan.version)
    plan = write_registered_plan(plan, store)
    write_bytes(folder / "study.yaml", Path(file).read_bytes())
    write_json(folder / "changes.json", without_secrets(changes))
    record_version_as_latest(folder, record)
    if latest is not None and latest.name != plan.version:
        previous = latest.run.file
        place = f" from {previous}," if previous and previous != record.file else ""
        now = read_study_content(folder / "study.yaml", changes)
        differ = "" if latest.content is None else f": {format_differences(latest.content, now)}"
        say(
            f"study '{plan.study}' was last run{place} in another version ({latest.when}){differ}. Both are kept: "
            f"'vitlab report {plan.study}@{latest.name[:8]}' prints the report of that one."
        )
    return plan


def _are_study_files_current(
    plan: Plan, store: Store, file: str | Path, changes: Values, plugins: Sequence[str | Path]
) -> bool:
    """Return True if the files of a study are those that :func:`write_study_files` would write, but for the time."""
    folder = store.study(plan.study)
    try:
        same_file = (folder / "study.yaml").read_bytes() == Path(file).read_bytes()
    except OSError:
        return False
    run = _read_record(folder)
    same_run = run == _make_run_record(folder, plan, file, plugins, run.time)
    written = json.loads(json.dumps([apply_registration(plan, store).to_json(), without_secrets(changes)]))
    return same_file and same_run and written == [read_json(folder / name) for name in ("plan.json", "changes.json")]


def _make_run_record(
    folder: Path, plan: Plan, file: str | Path, plugins: Sequence[str | Path], time_s: float
) -> RunRecord:
    """Return the record of a run of the study that is stored in ``folder``."""
    source = Path(file).resolve()
    if source.is_relative_to(folder.parent):  # a stored copy, run again
        source = Path(_read_record(folder).file or source)
    modules = tuple(str(Path(plugin).resolve()) for plugin in plugins)
    return RunRecord(plan.version, time_s, str(source), str(Path.cwd()), modules, checked_out_commit(source.parent))


def _read_record(folder: Path) -> RunRecord:
    """Return the record in run.json of a version; an empty one if it is missing or damaged."""
    return read_json(folder / "run.json", type_adapter(RunRecord).validate_python) or RunRecord()


def record_version_as_latest(study: Path, record: RunRecord) -> None:
    """Write run.json of a version that is now the latest, and delete the plan that it had as an earlier one."""
    write_json(study / "run.json", vars(record))
    # Only the plan: study.yaml there may be the file being run.
    (study / EARLIER / record.version / "plan.json").unlink(missing_ok=True)


def read_run_spec(folder: Path) -> RunSpec:
    """Return the run section of a study's stored file with the stored changes of the command line.

    Raises:
        SpecError: if the file cannot be read as a study.
    """
    changes = read_json(folder / "changes.json", require_mapping) or {}
    return qualify_default_builtins(_read_study_or_raise(folder / "study.yaml", changes)[0].run)


def qualify_default_builtins(run_spec: RunSpec) -> RunSpec:
    """Return ``run_spec`` with unset executor and tracker qualified as built-ins."""
    unset = [name for name in ("executor", "tracker") if name not in run_spec.model_fields_set]
    defaults = {name: Choice(slot(name).qualify_builtin(getattr(run_spec, name).type)) for name in unset}
    return run_spec.model_copy(update=defaults)


def checked_out_commit(folder: Path) -> str:
    """Return the git commit that is checked out in a folder; empty outside of a repository, or among installed files.

    Installed files may lie below a project, but are none of it.
    """
    return git_output(folder, "rev-parse", "HEAD") if INSTALLED.isdisjoint(folder.resolve().parts) else ""


def git_output(folder: Path, *words: str) -> str:
    """Return the output of git in a folder; empty if it fails or there is no git.

    ``rev-parse``, ``rev-list`` and ``config`` look at no files, so they start no program; ``status`` would.
    """
    try:
        process = subprocess.run(
            [*GIT, "--no-optional-locks", "-C", str(folder), *words],
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
            env={**os.environ, "GIT_NO_LAZY_FETCH": "1"},
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return process.stdout.strip() if process.returncode == 0 else ""


def find_version(study: Path, version: str) -> Version:
    """Return the version of a study whose name starts with ``version``.

    Raises:
        UserError: if there is none, or more than one.
    """
    existing = read_versions(study)
    matches = [item for item in existing if version and item.name.startswith(version)]
    if len(matches) != 1:
        what = "no version" if not matches else f"{len(matches)} versions"
        names = ", ".join(item.name[:8] for item in existing) or "none"
        raise UserError(f"{study.name}@{version}: study '{study.name}' has {what} of that name. Versions: {names}.")
    return matches[0]


def format_differences(first: Tree, second: Tree) -> str:
    """Format the differences of two contents: ``train.epochs 10 -> 1; seeds 5 -> 2``."""
    before, after = flatten(first), flatten(second)
    before, after = _append_type_to_paths(before, after), _append_type_to_paths(after, before)
    paths = [path for path in {**before, **after} if before.get(path, _ABSENT) != after.get(path, _ABSENT)]
    parts = (
        f"{path.removeprefix('base.')} "
        + " -> ".join(_format_value(leaves.get(path, _ABSENT)) for leaves in (before, after))
        for path in paths
    )
    return list_some(parts, MAX_DIFFERENCES, "; ")


_ABSENT = object()


def _read_version_folder(folder: Path) -> Version | None:
    """Return the version in a folder, or None if there is no plan.

    Its name is taken from the plan.  A run killed at its start may have written the plan alone; the other files are
    then of the previous version, and are ignored.
    """
    if not (folder / "plan.json").exists():
        return None
    run = _read_record(folder)
    changes = read_json(folder / "changes.json", require_mapping) or {}
    stored = None
    with suppress(SpecError):
        stored = read_study_content(folder / "study.yaml", changes)
    last = _version_name_in(vars(run))
    name = folder.name if folder.parent.name == EARLIER else ""
    with suppress(Damaged):
        name = name or _version_name_in(read_stored_strictly(folder / "plan.json", json_parser(require_mapping)) or {})
    name = name or last or "damaged"
    if last not in ("", name):
        stored, changes, run = None, {}, RunRecord()
    return Version(folder, name, stored, changes, run)


def _version_name_in(data: Tree) -> str:
    """Return the version that a stored file names; empty if there is none or it is not a digest, such as a path."""
    name = data.get("version")
    return name if isinstance(name, str) and re.fullmatch("[0-9a-f]+", name) else ""


def _canonical_content(value: Any, name: str = "") -> Any:
    """Return a value without ``data.root``, and with a component that has no options as its name alone."""
    if isinstance(value, Mapping):
        rest = {
            key: _canonical_content(item, str(key)) for key, item in value.items() if (name, key) != ("data", "root")
        }
        return rest["type"] if set(rest) == {"type"} else rest
    return (
        [_canonical_content(item) for item in value]
        if isinstance(value, Sequence) and not isinstance(value, str)
        else value
    )


def _append_type_to_paths(leaves: Values, others: Values) -> NewTree:
    """Return the leaves with a component in its long form, ``data.type``, where that is what others name it by."""
    return {
        f"{path}.type" if path not in others and f"{path}.type" in others and isinstance(value, str) else path: value
        for path, value in leaves.items()
    }


def _format_value(value: Any) -> str:
    # Written in full: what is rounded, or has no quotes in a list, may look the same before and after.
    text = "(absent)" if value is _ABSENT else value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
