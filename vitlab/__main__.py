"""``python -m vitlab`` and the ``vitlab`` command: Ctrl-C is handled before anything else is imported."""

from __future__ import annotations

import gc

from vitlab import interrupts

ALLOCATIONS = 100_000
"""Objects from one collection of garbage to the next.  Imports make many and leave little garbage: with Python's 700,
collections take a tenth of the time of a command that imports torch."""


def main() -> None:
    """Run the command line."""
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


if __name__ == "__main__":
    main()
