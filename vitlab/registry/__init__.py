"""Slots: the places of an experiment that are filled by name, and who fills them.

A slot stands in one module together with its contract and its built-in components, so nobody can hold the slot without
holding its members::

    position = Slot("position", Position)

    @position.register("rope2d")
    class RoPE2D(Position):
        def __init__(self, g: Geometry, *, theta: Annotated[float, Field(gt=0)] = 100.0) -> None: ...

The signature is the schema: what the model knows comes first and positionally, the keyword-only parameters are the
options in YAML, and their annotations, defaults and bounds are all that is ever checked.  An option that is itself a
component is annotated with :class:`Pick`.

Guests are pip packages with an entry point in the group ``vitlab.<slot>``; the entry point's name is the component's.
They are listed without being imported, imported when first used, and never replace a built-in; see
:mod:`vitlab.registry.plugins`.  A single file of components can be loaded for one run with :func:`load_file`.

The modules, from below: :mod:`~vitlab.registry.slot_modules` has the module of every slot,
:mod:`~vitlab.registry.options` makes schemas of signatures, :mod:`~vitlab.registry.resolved` is a checked choice,
:mod:`~vitlab.registry.plugin_files` loads single files, :mod:`~vitlab.registry.slot` is the slot, and
:mod:`~vitlab.registry.catalogue` lists without importing.
"""

from vitlab.registry.catalogue import Entry as Entry
from vitlab.registry.catalogue import listing as listing
from vitlab.registry.options import SLOT_MARK as SLOT_MARK
from vitlab.registry.options import Pick as Pick
from vitlab.registry.options import Unhashed as Unhashed
from vitlab.registry.plugin_files import load_file as load_file
from vitlab.registry.resolved import Resolved as Resolved
from vitlab.registry.slot_modules import BUILT_IN as BUILT_IN
from vitlab.registry.slot_modules import ROOMS as ROOMS
from vitlab.registry.slot_modules import Origin as Origin
from vitlab.registry.slot_modules import slot as slot
from vitlab.registry.slots import Slot as Slot
