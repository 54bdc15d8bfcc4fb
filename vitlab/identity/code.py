"""The code digest of a trial, which makes manual version numbers unnecessary.

It covers the modules of the trial's components and of their base classes, the module that runs trials, the optional
modules that its spec asks for (:data:`vitlab.registry.OPTIONAL_MODULES`), every component file loaded for the run, used
or not, and the transitive imports of these, taken from the source text (:mod:`vitlab.identity.source`).  A package that
only re-exports names counts as the modules that define them, so that a component does not depend on its neighbours.

The standard library and vitlab's own requirements, such as torch, are not covered: results record their versions.  A
trial that pins such versions (:class:`Surroundings`) has them in its code digest.
"""

import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from operator import attrgetter
from types import ModuleType

from vitlab.identity import source
from vitlab.identity.trial import hash_of
from vitlab.imports import file_stamp, last_imports, reloads
from vitlab.registry import BUILT_IN, OPTIONAL_MODULES, ResolvedChoice, plugins, slot
from vitlab.registry.slot_modules import built_ins
from vitlab.spec.trial import SLOTS_OF_A_TRIAL, TrialSpec

RUNNER = "vitlab.runner.execution"
"""Module that runs trials; it is part of the code of every trial."""


@dataclass(frozen=True)
class Surroundings:
    """Component files and pinned versions, shared by all trials of a plan and part of their code digest."""

    files: frozenset[str] = frozenset()  #: modules of the component files that are loaded
    versions: Mapping[str, str] = field(default_factory=dict)
    """Package to the version required for training; empty for the installed versions."""


NOTHING = Surroundings()
"""No component files, and the installed versions."""


def modules_of_spec(spec: TrialSpec) -> frozenset[str]:
    """Return the root modules of a trial's code in this process, including every loaded component file."""
    return component_modules(iter_resolved_choices(spec)) | used_optional_modules(spec) | frozenset(plugins.files)


def imported_requirements(spec: TrialSpec) -> dict[str, str]:
    """Return name to version of the installed distributions that a trial's code imports in this process."""
    digests = trial_module_digests(modules_of_spec(spec), source.read_source_as_imported)
    pairs = (name.partition("==") for name in digests if "==" in name)
    return {name: version for name, _, version in pairs}


def used_optional_modules(spec: TrialSpec) -> frozenset[str]:
    """Return the optional modules that a trial uses."""
    is_used = {
        "distillation": spec.distill is not None,
        "mixing": spec.train.mix is not None,
        "averaging": spec.train.ema is not None,
        "mup": spec.model.options.get("parametrization") == "mup",
        "weights": any(other.trial is None for other in spec.sources().values()),
    }
    return frozenset(OPTIONAL_MODULES[name] for name, used in is_used.items() if used)


def trial_code_digest(
    modules: frozenset[str],
    needs: Mapping[str, str] = {},
    versions: Mapping[str, str] = {},
    reader: source.Reader = source.read_source_for_new_worker,
) -> str:
    """Return the code digest of a trial in this process; 128 bits in hex.

    Args:
        modules: its root modules.
        needs: role to ``key/code`` of its prerequisites; a change of their code changes this digest.
        versions: pinned versions of packages.
        reader: reads the source of a module.
    """
    # The code of prerequisites counts by their names, which hold it, so a change there retrains what starts from them.
    digest = hashlib.blake2b(digest_size=16)
    for module, text in sorted(trial_module_digests(modules, reader).items()):
        digest.update(f"{module}\n{text}\n".encode())
    own = digest.hexdigest()
    beside = {**needs, **({"versions": dict(versions)} if versions else {})}
    return hash_of({"own": own, **beside})[:32] if beside else own


def component_modules(choices: Iterable[ResolvedChoice]) -> frozenset[str]:
    """Return the modules of the components of these choices and of their base classes, nested ones included."""
    return frozenset().union(*(class_modules(part.component) for choice in choices for part in choice.walk()))


def class_modules(component: type) -> frozenset[str]:
    """Return the modules of a component and of its base classes.

    A base class from an installed distribution counts as a requirement, such as ``timm==1.0.20``.
    """
    bases = {source.dependency_name(base.__module__, component.__module__) for base in component.__mro__[1:]}
    return frozenset({component.__module__, *bases} - {""})


def iter_resolved_choices(spec: TrialSpec) -> Iterator[ResolvedChoice]:
    """Yield the resolved choices of a trial: one for each of its slots, and the metrics it names."""
    for path, name in SLOTS_OF_A_TRIAL.items():
        yield slot(name).resolve_choice(attrgetter(".".join(path))(spec))
    for metric in spec.train.metrics:
        yield slot("metric").resolve_choice(metric)


def resolve_spec(spec: TrialSpec) -> TrialSpec:
    """Return a trial's spec with its choices resolved, so that nobody who builds them resolves them again."""
    data, model, *rest = iter_resolved_choices(spec)
    names = [path[-1] for path in SLOTS_OF_A_TRIAL][2:]
    train = {**dict(zip(names, rest, strict=False)), "metrics": tuple(rest[len(names) :])}
    return spec.model_copy(update={"data": data, "model": model, "train": spec.train.model_copy(update=train)})


def clear_caches() -> None:
    """Clear all caches of source files, so that later digests are of the files as they are then."""
    source.clear_caches()
    trial_module_digests.cache_clear()


_inherited: dict[str, tuple[str, list[str]]] = {}
"""Digest and dependencies of each module of vitlab that was imported before this process was forked.

They hold for as long as the process lives, whatever happens to the files.
"""


def preload_vitlab_digests() -> None:
    """Read every imported module of vitlab, for the processes that are forked from this one."""
    for module in [name for name in sys.modules if name.partition(".")[0] == BUILT_IN]:
        _inherited[module] = (
            source.read_source_as_imported(module).digest,
            source.direct_dependencies(module, source.read_source_as_imported),
        )
    clear_caches()  # every worker clears its caches, and clearing inherited ones would copy their memory


@cache  # the trials of a job have few different sets of modules
def trial_module_digests(modules: frozenset[str], reader: source.Reader) -> Mapping[str, str]:
    """Return module name to digest, for the code of a trial: its root modules, the runner, the engines, their imports.

    Any built-in engine may compute the trial, and none is imported before it is chosen.
    """
    engines = (place.module for place in built_ins("engine").values())
    return transitive_digests({RUNNER, *engines, *modules}, reader)


def transitive_digests(
    modules: Iterable[str], reader: source.Reader = source.read_source_for_new_worker
) -> dict[str, str]:
    """Return module name to digest, for the given modules and their transitive dependencies.

    A requirement such as ``timm==1.0.20`` is a key, too, with an empty digest.
    """
    digests: dict[str, str] = {}
    queue = list(modules)  # of modules and requirements
    while queue:
        module = queue.pop()
        if module in digests:
            continue
        if "==" in module:
            digests[module] = ""
            continue
        digests[module], needed = _inherited.get(module) or (
            reader(module).digest,
            source.direct_dependencies(module, reader),
        )
        queue += needed
    return digests


def edited_module_message(modules: Iterable[str]) -> str:
    """Return an error message about the first module edited since this process imported it, or ``""``."""
    for module in modules:
        if (
            "==" not in module
            and source.read_source_as_imported(module).digest != source.read_source_for_new_worker(module).digest
        ):
            return (
                f"{source.file_of(module)} was edited after this process had imported it; restart the process (in a "
                "notebook, restart the kernel, or reload the module) and run again"
            )
    return ""


def mixed_versions_message(modules: Iterable[str]) -> str:
    """Return an error message if this process mixes two versions of code, or ``""``.

    After ``b`` alone is reloaded, a module with ``from b import f`` still has the old ``f``; after an upgrade of a
    distribution, the process still runs the version that it imported.
    """
    for module in modules:
        if "==" in module:
            top = source.tops.get(module, "")
            last, file = last_imports.get(top), source.file_of(top)
            if top in sys.modules and last is not None and file is not None and last.stamp != file_stamp(file):
                return (
                    f"{module} was installed after this process had imported {top}; restart the process (in a "
                    "notebook, restart the kernel) and run again"
                )
            continue
        mine = last_imports.get(module)
        if mine is None or module not in sys.modules:
            continue
        for base, name in source.read_source_as_imported(module).imports if reloads else ():
            if reloads.get(base, -1) <= mine.number or not name:
                continue
            if not isinstance(getattr(sys.modules.get(base), name, None), ModuleType):
                return (
                    f"{source.file_of(module)} has {name} of {base} from before that was reloaded; reload this file, "
                    "too, or restart the process (in a notebook, restart the kernel), and run again"
                )
    return ""
