"""Identity: the key of a trial, and the digest of the code it would run.

The **key** is a 256-bit hash of the canonical JSON of everything that makes a trial what it is: the resolved spec with
all defaults, the seeds, the origins of its components and the identity of its data.

The **code digest** saves everybody from bumping a version by hand.  It covers the module of every component of the
trial, the module that runs trials, and every module of vitlab or of the component's own package that these import,
followed in the text of the modules (:mod:`vitlab.plan.source`).  A package that only passes names on counts as the
modules these names come from, so that one component does not depend on its neighbours.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from vitlab.plan import source
from vitlab.slots import Resolved, slot
from vitlab.spec.trial import METRICS, SLOTS_OF_A_TRIAL, SOURCES

RUNNER = "vitlab.trial"
"""The module that runs trials, whatever they are made of."""
READER = "vitlab.models.weights"
"""The package that reads files of weights."""
PUBLISHED = "vitlab.models.weights.pretrained"
"""The module of weights that torchvision publishes."""
DISTILLATION = "vitlab.training.distillation"
"""The module of learning from a teacher."""
PROBE = "vitlab.training.probe"
"""The module of heads in closed form."""
MIXING = "vitlab.training.mix"
"""The module of training on mixed images."""
AVERAGING = "vitlab.training.ema"
"""The module of averages of weights."""


def key_of(identity: Mapping[str, Any]) -> str:
    """Hash of the canonical JSON of ``identity``: sorted keys, no white space."""
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()


def code_of(spec: Mapping[str, Any], needs: Mapping[str, str] = {}) -> str:
    """The code digest of a trial, from its resolved spec and the ``key/code`` of the trials it starts from.

    What a trial starts from is part of what it runs: a change of code there makes this one another result too.
    """
    return code_of_modules(modules_of(components(spec)) | modules_beside(spec), needs)


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


def code_of_modules(modules: frozenset[str], needs: Mapping[str, str] = {}) -> str:
    """As :func:`code_of`, where the modules of the trial's components are known."""
    own = code_digest(modules)
    return key_of({"own": own, **needs})[:32] if needs else own


def modules_of(choices: Iterable[Resolved]) -> frozenset[str]:
    """The modules in which the components of these choices stand, nested ones included."""
    return frozenset(part.component.__module__ for choice in choices for part in choice.parts())


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
def code_digest(modules: frozenset[str]) -> str:
    """Digest of the given modules, of the runner, and of all they import; 128 bits in hex."""
    digest = hashlib.blake2b(digest_size=16)
    for module, text in sorted(closure({RUNNER, *modules}).items()):
        digest.update(f"{module}\n{text}\n".encode())
    return digest.hexdigest()


def read_ahead() -> None:
    """Read every module of vitlab that has been imported, so that processes forked from this one need not."""
    closure(module for module in sys.modules if module.partition(".")[0] == "vitlab")


def closure(modules: Iterable[str]) -> dict[str, str]:
    """Module name to the digest of its text, for the modules and everything of their packages they import."""
    found: dict[str, str] = {}
    waiting = sorted(modules)
    while waiting:
        module = waiting.pop()
        if module in found:
            continue
        text = source.read(module)
        found[module] = text.digest
        packages = {"vitlab", module.partition(".")[0]}
        waiting += [source.home(*place) for place in text.imports if place[0].partition(".")[0] in packages]
    source.remember()
    return found
