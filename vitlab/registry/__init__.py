"""Slots: the axes of an experiment that a component fills by name.

A slot is defined in one module or package together with its contract and its built-in components, which are imported
when they are first asked for::

    position = Slot("position", Position)

    @position.register("rope2d")
    class RoPE2D(Position):
        def __init__(self, g: Geometry, *, theta: Annotated[float, Field(gt=0)] = 100.0) -> None: ...

The signature is the schema: positional parameters are supplied by the model, keyword-only parameters are the options in
YAML, and their annotations, defaults and bounds are the complete validation.  An option that is itself a component is
annotated with :class:`Pick`.

Plugins are pip packages with an entry point in the group ``vitlab.<slot>``; the entry point's name is the component's.
They are listed without being imported, imported on first use, and never replace a built-in; see
:mod:`vitlab.registry.plugins`.  A single file of components can be loaded for one run with :func:`load_file`.

The modules, lowest layer first: :mod:`~vitlab.registry.slot_modules` maps slots and built-in components to modules,
:mod:`~vitlab.registry.plugins` reads what installed packages offer, records the files that were run and finds plugins
in failures, :mod:`~vitlab.registry.options` derives schemas from signatures and holds validated choices,
:mod:`~vitlab.registry.slots` holds the slot class and lists components without importing them, and
:mod:`~vitlab.registry.file_loader` runs files.
"""

from vitlab.registry.file_loader import load_file
from vitlab.registry.options import ResolvedChoice, Unhashed
from vitlab.registry.slot_modules import BUILT_IN, OPTIONAL_MODULES, SLOT_MODULES, Origin, import_optional, import_slot
from vitlab.registry.slots import Pick, Slot, list_entries, slot

__all__ = [
    "BUILT_IN",
    "OPTIONAL_MODULES",
    "SLOT_MODULES",
    "Origin",
    "Pick",
    "ResolvedChoice",
    "Slot",
    "Unhashed",
    "import_optional",
    "import_slot",
    "list_entries",
    "load_file",
    "slot",
]
