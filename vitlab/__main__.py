"""``python -m vitlab`` and the ``vitlab`` command: Ctrl-C is handled before anything else is imported."""

import gc
import os
import sys

from vitlab import interrupts

ALLOCATIONS = 500_000
"""Objects from one collection of garbage to the next.  Imports make many and leave little garbage: with Python's 700,
collections take a tenth of the time of a command that imports torch.  Figures are garbage that only a collection frees:
a command that draws 400 of them holds up to 150 MB more."""


def main() -> None:
    """Run the command line."""
    open_closed_standard_streams()
    interrupts.install()
    gc.set_threshold(ALLOCATIONS)
    from vitlab.cli import main as run_command

    interrupts.state.left = 2
    try:
        run_command()
        interrupts.state.code = 0
    except SystemExit as exit_:
        interrupts.state.code = exit_.code if isinstance(exit_.code, int) else None
        interrupts.state.reported = exit_.code == interrupts.EXIT_CODE
        raise
    finally:
        interrupts.state.left = 0


def open_closed_standard_streams() -> None:
    """Open the standard streams that are closed, so that no file of the command gets their descriptors.

    Input is then empty and messages are dropped; output cannot be written, which fails as in coreutils.
    """
    for name, flags, mode in (("stdin", os.O_RDONLY, "r"), ("stdout", os.O_RDONLY, "w"), ("stderr", os.O_WRONLY, "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, flags)  # the lowest that is free, and so that of the stream
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))
        if sys.platform == "win32":  # pipes have a code page, which lacks signs of the reports
            getattr(sys, name).reconfigure(encoding="utf-8")


if __name__ == "__main__":
    main()
