"""Identity: the key of a trial, and the digest of the code it would run.

The **key** is a 256-bit hash of the canonical JSON of everything that makes a trial what it is: the resolved spec with
all defaults, the seeds, the origins of its components and the identity of its data.

The **code digest** saves everybody from bumping a version by hand.  It covers the module of every component of the
trial and those of its base classes, the module that runs trials, every file of components that was loaded for the run,
used or not, for it may change anything, and all that these import, followed in the text of the modules
(:mod:`vitlab.plan.source`).  A package that only passes names on counts as the modules these names come from, so that
one component does not depend on its neighbours.

Not covered are the standard library and the packages that vitlab itself requires, torch above all: results record their
versions.  A trial that names such versions (:class:`Surroundings`) has them in its code, too.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from vitlab.plan import source
from vitlab.registry import Resolved, plugin_files, slot
from vitlab.spec.trial import METRICS, SLOTS_OF_A_TRIAL, SOURCES

RUNNER = "vitlab.runner.run"
"""The module that runs trials, whatever they are made of."""
READER = "vitlab.weights"
"""The package that reads files of weights."""
PUBLISHED = "vitlab.weights.pretrained"
"""The module of weights that torchvision publishes."""
DISTILLATION = "vitlab.training.distillation"
"""The module of learning from a teacher."""
PROBE = "vitlab.training.linear_probe"
"""The module of heads in closed form."""
MIXING = "vitlab.training.mixup"
"""The module of training on mixed images."""
AVERAGING = "vitlab.training.ema"
"""The module of averages of weights."""


def key_of(identity: Mapping[str, Any]) -> str:
    """Hash of the canonical JSON of ``identity``: sorted keys, no white space."""
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()


@dataclass(frozen=True)
class Surroundings:
    """What surrounds the trials of a plan, and is part of their code."""

    files: frozenset[str] = frozenset()  #: modules of the files of components that are loaded for them
    versions: Mapping[str, str] = field(default_factory=dict)
    """Packages and the versions that trials are to be trained under; empty for whatever is installed."""


NOTHING = Surroundings()
"""No files of components, and whatever is installed."""


def code_of(
    spec: Mapping[str, Any],
    needs: Mapping[str, str] = {},
    versions: Mapping[str, str] = {},
    reader: source.Reader = source.expected,
) -> str:
    """Return the code digest that a trial has in this process.

    Args:
        spec: resolved.
        needs: role to ``key/code`` of the trials it starts from.  A change of code there makes this one another result.
        versions: as of :class:`Surroundings`.
        reader: tells what modules say; by default what a worker will run.
    """
    return code_of_modules(modules_of_spec(spec), needs, versions, reader)


def modules_of_spec(spec: Mapping[str, Any]) -> frozenset[str]:
    """Return the modules that a trial's code begins with in this process, all files it has loaded included."""
    return modules_of(components(spec)) | modules_beside(spec) | plugin_files.modules()


def requirements_of(spec: Mapping[str, Any]) -> dict[str, str]:
    """Return name to version of the installed distributions that a trial's code imports."""
    found = closure({RUNNER, *modules_of_spec(spec)})
    pairs = (name.partition("==") for name in found if "==" in name)
    return {name: version for name, _, version in pairs}


def modules_beside(spec: Mapping[str, Any]) -> frozenset[str]:
    """The modules that a trial needs beside those of its components; of trials that do without, they are no part."""
    train = spec.get("train") or {}
    asked = {DISTILLATION: spec.get("distill"), MIXING: train.get("mix"), AVERAGING: train.get("ema")}
    found = {module for module, how in asked.items() if how is not None}
    if (spec.get("init_from") or {}).get("head") == "fitted":
        found.add(PROBE)
    for path in SOURCES.values():
        source: Any = spec
        for part in path:
            source = source.get(part) or {}
        if source.get("checkpoint") is not None or source.get("pretrained") is not None:
            found.add(READER)
    return frozenset(found)


def code_of_modules(
    modules: frozenset[str],
    needs: Mapping[str, str] = {},
    versions: Mapping[str, str] = {},
    reader: source.Reader = source.expected,
) -> str:
    """Return what :func:`code_of` does, where the modules that a trial's code begins with are known."""
    own = code_digest(modules, reader)
    beside = {**needs, **({"versions": dict(versions)} if versions else {})}
    return key_of({"own": own, **beside})[:32] if beside else own


def modules_of(choices: Iterable[Resolved]) -> frozenset[str]:
    """Return the modules of the components of these choices and of their base classes, nested ones included."""
    return frozenset().union(*(modules_of_class(part.component) for choice in choices for part in choice.parts()))


def modules_of_class(component: type) -> frozenset[str]:
    """Return the modules of a component and of its base classes.

    Base classes in what is installed count as requirements, such as ``timm==1.0.20``.
    """
    bases = {source.standing(base.__module__, component.__module__) for base in component.__mro__[1:]}
    return frozenset({component.__module__, *bases} - {""})


def components(spec: Mapping[str, Any]) -> Iterator[Resolved]:
    """The resolved choices of a trial: one for each slot that it has, and the metrics it names."""
    for path, name in SLOTS_OF_A_TRIAL.items():
        value: Any = spec
        for part in path:
            value = value[part]
        yield slot(name).resolve(value)
    train, metrics = METRICS
    for value in spec[train].get(metrics, ()):
        yield slot("metric").resolve(value)


@cache
def code_digest(modules: frozenset[str], reader: source.Reader = source.expected) -> str:
    """Return the digest of the given modules, of the runner, and of all they import; 128 bits in hex."""
    digest = hashlib.blake2b(digest_size=16)
    for module, text in sorted(closure({RUNNER, *modules}, reader).items()):
        digest.update(f"{module}\n{text}\n".encode())
    return digest.hexdigest()


def refresh() -> None:
    """Look at every file anew from here on: what is planned or checked next is of the code as it is then."""
    source.refresh()
    code_digest.cache_clear()


def read_ahead() -> None:
    """Read every module of vitlab that has been imported, so that processes forked from this one need not."""
    closure(module for module in sys.modules if module.partition(".")[0] == "vitlab")


def closure(modules: Iterable[str], reader: source.Reader = source.expected) -> dict[str, str]:
    """Return module name to the digest of its text, for the modules and all that is followed from them.

    A requirement such as ``timm==1.0.20`` stands among the modules, with no digest.
    """
    found: dict[str, str] = {}
    waiting = sorted(modules)
    while waiting:
        module = waiting.pop()
        if module in found:
            continue
        if "==" in module:
            found[module] = ""
            continue
        found[module] = reader(module).digest
        waiting += source.followed(module, reader)
    source.remember()
    return found
