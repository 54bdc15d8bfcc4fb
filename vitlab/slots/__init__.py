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
:mod:`vitlab.guests`.  A single file of components can be loaded for one run with :func:`load_file`.

From below: :mod:`~vitlab.slots.rooms` knows where slots stand, :mod:`~vitlab.slots.options` makes schemas of
signatures, :mod:`~vitlab.slots.resolved` is a choice that was found and checked, :mod:`~vitlab.slots.files` runs files
of components, :mod:`~vitlab.slots.registry` is the slot, and :mod:`~vitlab.slots.catalogue` lists without importing.
"""

from vitlab.slots.catalogue import Entry as Entry
from vitlab.slots.catalogue import listing as listing
from vitlab.slots.files import load_file as load_file
from vitlab.slots.options import SLOT_MARK as SLOT_MARK
from vitlab.slots.options import Pick as Pick
from vitlab.slots.options import Unhashed as Unhashed
from vitlab.slots.registry import Slot as Slot
from vitlab.slots.resolved import Resolved as Resolved
from vitlab.slots.rooms import BUILT_IN as BUILT_IN
from vitlab.slots.rooms import ROOMS as ROOMS
from vitlab.slots.rooms import Origin as Origin
from vitlab.slots.rooms import slot as slot
