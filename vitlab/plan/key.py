"""Identity: the key of a trial, the digest of the code it would run, and the digests of checkpoint files.

The **key** is a 256-bit hash of the canonical JSON of the resolved spec with all defaults, the seeds, the origins of
the components and the identity of the data.

The **code digest** makes manual version numbers unnecessary.  It covers the modules of the trial's components and of
their base classes, the module that runs trials, every component file loaded for the run, used or not, and the
transitive imports of these, taken from the source text (:mod:`vitlab.plan.source`).  A package that only re-exports
names counts as the modules that define them, so that a component does not depend on its neighbours.

The standard library and vitlab's own requirements, such as torch, are not covered: results record their versions.  A
trial that pins such versions (:class:`Surroundings`) has them in its code digest.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

from vitlab.imports import Stamp, stamp_of
from vitlab.plan import source
from vitlab.registry import ResolvedChoice, plugin_files, slot
from vitlab.spec import Choice, TrainSpec
from vitlab.spec.trial import OBJECTIVE, SLOTS_OF_A_TRIAL, TrialSpec

RUNNER = "vitlab.runner.run"
"""Module that runs trials."""
READER = "vitlab.weights"
"""Package that reads weight files."""
DISTILLATION = "vitlab.training.distillation"
"""Module of distillation."""
PROBE = "vitlab.training.linear_probe"
"""Module of heads fitted in closed form."""
FEATURES = "vitlab.training.feature_metrics"
"""Module that computes metrics of features."""
MIXING = "vitlab.training.mixup"
"""Module of mixup and cutmix."""
AVERAGING = "vitlab.training.ema"
"""Module of the moving average of weights."""
WIDTH = "vitlab.models.mup"
"""Module of the maximal update parametrization."""
SCALING = "vitlab.training.scaling"
"""Module of loss scaling."""
FURTHER_TESTS = "vitlab.data.further"
"""Module of further test images, such as corrupted ones."""
FURTHER_OPTIONS = ("corrupted", "shifted")
"""Options of a data set that add them."""

NAMES_ON_THE_HUB = ("model.safetensors", "pytorch_model.bin")
"""Names under which Hugging Face's hub stores weights; such a file is read together with :data:`DESCRIPTIONS`."""

DESCRIPTIONS = ("config.json", "preprocessor_config.json")


def key_of(identity: Mapping[str, Any]) -> str:
    """Return the hash of the canonical JSON of ``identity``."""
    return _hash(canonical(identity))


def key_of_texts(texts: Mapping[str, str]) -> str:
    """Return :func:`key_of` of a mapping whose values are canonical JSON already."""
    return _hash(f"{{{','.join(f'{canonical(name)}:{text}' for name, text in sorted(texts.items()))}}}")


def canonical(value: Any) -> str:
    """Return the canonical JSON of a value: sorted keys, no white space."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()


@dataclass(frozen=True)
class Surroundings:
    """Component files and pinned versions, shared by all trials of a plan and part of their code digest."""

    files: frozenset[str] = frozenset()  #: modules of the component files that are loaded
    versions: Mapping[str, str] = field(default_factory=dict)
    """Package to the version required for training; empty for the installed versions."""


NOTHING = Surroundings()
"""No component files, and the installed versions."""


def code_of(spec: TrialSpec, needs: Mapping[str, str] = {}) -> str:
    """Return the code digest that a trial has in this process.

    Args:
        spec: resolved spec.
        needs: role to ``key/code`` of its prerequisites; a change of their code changes this digest.
    """
    return code_of_modules(modules_of_spec(spec), needs)


def modules_of_spec(spec: TrialSpec) -> frozenset[str]:
    """Return the root modules of a trial's code in this process, including every loaded component file."""
    return modules_of(components(spec)) | modules_beside(spec) | plugin_files.modules()


def requirements_of(spec: TrialSpec) -> dict[str, str]:
    """Return name to version of the installed distributions that a trial's code imports in this process."""
    digests = closure({RUNNER, *modules_of_spec(spec)}, source.loaded)
    pairs = (name.partition("==") for name in digests if "==" in name)
    return {name: version for name, _, version in pairs}


def modules_beside(spec: TrialSpec) -> frozenset[str]:
    """Return the root modules of a trial's optional features, such as distillation, that its spec uses."""
    options = {DISTILLATION: spec.distill, MIXING: spec.train.mix, AVERAGING: spec.train.ema}
    modules = {module for module, option in options.items() if option is not None}
    if spec.model.options.get("parametrization") == "mup":
        modules.add(WIDTH)
    if spec.train.precision == "fp16":
        modules.add(SCALING)
    if any(spec.data.options.get(name) for name in FURTHER_OPTIONS):
        modules.add(FURTHER_TESTS)
    if spec.init_from is not None and spec.init_from.head == "fitted":
        modules.add(PROBE)
    if any(slot("metric").resolve(metric).component.reads == "features" for metric in spec.train.metrics):  # type: ignore[attr-defined]
        modules.add(FEATURES)
    if any(source.trial is None for source in spec.sources().values()):
        modules.add(READER)
    return frozenset(modules)


def code_of_modules(
    modules: frozenset[str],
    needs: Mapping[str, str] = {},
    versions: Mapping[str, str] = {},
    reader: source.Reader = source.expected,
) -> str:
    """Return the code digest of a trial, see :func:`code_of`, from its root modules."""
    own = code_digest(modules, reader)
    beside = {**needs, **({"versions": dict(versions)} if versions else {})}
    return key_of({"own": own, **beside})[:32] if beside else own


def modules_of(choices: Iterable[ResolvedChoice]) -> frozenset[str]:
    """Return the modules of the components of these choices and of their base classes, nested ones included."""
    return frozenset().union(*(modules_of_class(part.component) for choice in choices for part in choice.parts()))


def modules_of_class(component: type) -> frozenset[str]:
    """Return the modules of a component and of its base classes.

    A base class from an installed distribution counts as a requirement, such as ``timm==1.0.20``.
    """
    bases = {source.dependency_name(base.__module__, component.__module__) for base in component.__mro__[1:]}
    return frozenset({component.__module__, *bases} - {""})


def components(spec: TrialSpec) -> Iterator[ResolvedChoice]:
    """Yield the resolved choices of a trial: one for each of its slots, and the metrics it names."""
    for path, name in SLOTS_OF_A_TRIAL.items():
        choice = attrgetter(".".join(path))(spec)
        yield slot(name).resolve(objective_of(choice) if path == OBJECTIVE else choice)
    for metric in spec.train.metrics:
        yield slot("metric").resolve(metric)


def objective_of(choice: Choice) -> Choice:
    """Return the objective of a trial: the default is the built-in one even where a plugin offers one of its name."""
    is_default = choice == TrainSpec.model_fields["objective"].default
    return Choice(slot("objective").qualify_builtin(choice.type)) if is_default else choice


@cache
def code_digest(modules: frozenset[str], reader: source.Reader = source.expected) -> str:
    """Return the digest of the given modules, of the runner, and of all they import; 128 bits in hex."""
    digest = hashlib.blake2b(digest_size=16)
    for module, text in sorted(closure({RUNNER, *modules}, reader).items()):
        digest.update(f"{module}\n{text}\n".encode())
    return digest.hexdigest()


def refresh() -> None:
    """Clear all caches of source files, so that later digests are of the files as they are then."""
    source.refresh()
    code_digest.cache_clear()
    _closure.cache_clear()


def read_ahead() -> None:
    """Read every imported module of vitlab, so that forked processes find it in the cache."""
    closure((module for module in sys.modules if module.partition(".")[0] == "vitlab"), source.loaded)
    refresh()  # every worker clears its caches, and clearing inherited ones would copy their memory


def closure(modules: Iterable[str], reader: source.Reader = source.expected) -> dict[str, str]:
    """Return module name to digest, for the given modules and their transitive dependencies.

    A requirement such as ``timm==1.0.20`` is a key, too, with an empty digest.
    """
    return dict(_closure(frozenset(modules), reader))


@cache
def _closure(modules: frozenset[str], reader: source.Reader) -> Mapping[str, str]:
    """Return :func:`closure`, which takes milliseconds; the trials of a job have few different sets of modules."""
    digests: dict[str, str] = {}
    queue = sorted(modules)
    while queue:
        module = queue.pop()
        if module in digests:
            continue
        if "==" in module:
            digests[module] = ""
            continue
        digests[module] = reader(module).digest
        queue += source.dependencies(module, reader)
    source.remember()
    return digests


def files_of(file: Path) -> tuple[Path, ...]:
    """Return a file of weights and the files beside it that are read with it, whether they exist or not."""
    beside = DESCRIPTIONS if file.name in NAMES_ON_THE_HUB else ()
    return (file, *map(file.with_name, beside))


def digests_of(file: Path) -> dict[str, str]:
    """Return name to SHA-256 of every file that a checkpoint consists of.

    Raises:
        FileNotFoundError: if the weights themselves do not exist.
    """
    existing = [file, *(other for other in files_of(file)[1:] if other.is_file())]
    return {each.name: _sha256(each.resolve(), stamp_of(each)) for each in existing}


def identity_of(digests: Mapping[str, str]) -> str | dict[str, str]:
    """Return a checkpoint's part of a trial's identity: its content, independent of its path.

    Args:
        digests: as returned by :func:`digests_of`, the weights first.
    """
    weights, *beside = digests.items()
    return {"weights": weights[1], **dict(beside)} if beside else weights[1]


@cache
def _sha256(file: Path, stamp: Stamp | None) -> str:
    """Return the SHA-256 of a file; the stamp is part of the key of the cache."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
