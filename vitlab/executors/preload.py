"""Imported once by the fork server, so that a worker begins with everything imported, some 30 ms after it is asked for.

Nothing here may start a thread or touch CUDA, because neither outlives a fork: so no tensor is computed, and the
libraries that would start threads as they are imported are told to hold one.  Guests are never imported here: a plugin
that breaks breaks only the trials that name it.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
from contextlib import suppress

from vitlab.plan.key import read_ahead
from vitlab.registry import BUILT_IN, SLOT_MODULES, listing, slot

# Ctrl-C goes to the whole foreground group, and a scheduler's signals to all processes of a job; they are for the
# driver to pass on.  Workers inherit this.
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # see vitlab.executors.local.start_server

for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"):
    os.environ[variable] = "1"

# Arrow's allocator starts a thread otherwise, and a server that forks must have one alone.
os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"

# torch.optim imports dynamo when first used, and files are written by pyarrow and ctypes: a second that no trial
# need pay.
for module in (
    "torch",
    "torch._dynamo",
    "numpy.ctypeslib",
    "pyarrow.parquet",
    "vitlab.runner.run",
    *SLOT_MODULES.values(),
):
    with suppress(Exception):  # what does not import here is imported again, and reported, by the worker that needs it
        importlib.import_module(module)

read_ahead()  # every worker compares the code that is here with that of its plan
for entry in (entry for name in SLOT_MODULES for entry in listing(name) if entry.origin.source == BUILT_IN):
    with suppress(Exception):  # it has options without a default, or shares its name with a guest
        slot(entry.slot).resolve(entry.name)

with suppress(Exception):  # as above
    importlib.import_module("vitlab.runner.circumstances").rehearse()

gc.collect()
gc.freeze()  # or each worker's collector would go through all of the above, and copy its pages to note that it did
