"""Imports of the fork server, so that a worker starts within about 30 ms with everything imported.

Nothing here may start a thread or initialise CUDA, because neither survives a fork: no tensor is computed, and
libraries that would start threads on import are limited to one.  Plugins are never imported here, so that a broken
plugin breaks only the trials that use it.
"""

# ruff: noqa: F401  # modules are imported for the processes that are forked

import gc
import os
import signal
from contextlib import suppress

from vitlab.identity import source
from vitlab.identity.code import preload_vitlab_digests, trial_module_digests
from vitlab.imports import import_object
from vitlab.registry import SLOT_MODULES, slot
from vitlab.registry.plugins import slot_points
from vitlab.registry.slot_modules import built_ins

gc.disable()  # a collection during imports takes time and finds nothing

# Ctrl-C is sent to the whole foreground group, and a scheduler's signals to all processes of a job; only the driver
# handles them.  Workers inherit this.
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # see vitlab.runner.fork_server

for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"):
    os.environ[variable] = "1"

# Otherwise Arrow's allocator starts a thread, and a process that forks must have only one.
os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"

SLOTS = [name for name in SLOT_MODULES if name not in ("tracker", "section")]  # only the driver uses these

# What trials import on first use: vmap and the profiler's hooks of torch modules, files pyarrow and ctypes, and
# optimizers of plugins dynamo.  Importing them here saves each trial up to a second.
with suppress(Exception):  # a failing import is repeated, and reported, by the worker that needs it
    import numpy.ctypeslib
    import PIL.features
    import pyarrow.parquet
    import torch.utils._device

    import vitlab.runner.execution

    if slot_points("optimizer"):
        import torch._dynamo
with suppress(ImportError):  # private modules, which other versions of torch may lack
    import torch.fx.experimental.symbolic_shapes
    import torch.profiler._cupti_monitor

for name in SLOTS:
    for component in built_ins(name):
        with suppress(Exception):  # as above, or it has options without a default, or shares its name with a plugin
            slot(name).resolve_choice(component)

for module in trial_module_digests(frozenset(), source.read_source_as_imported):
    with suppress(Exception):  # as above
        import_object(module)
preload_vitlab_digests()  # every worker compares the installed code with its plan's

with suppress(Exception):  # as above
    from vitlab.runner.circumstances import fill_caches_before_fork

    fill_caches_before_fork()
    PIL.features.version("webp")  # loads the library, whose version is part of the identity of pictures

# Each worker's collector would otherwise visit all of the above and so copy its memory pages.  Frozen objects do not
# count when Python decides on a full collection, which would be too frequent for a worker's own few objects.
gc.freeze()
gc.set_threshold(*gc.get_threshold()[:2], 100)
gc.enable()
