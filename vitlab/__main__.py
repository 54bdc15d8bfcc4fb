"""``python -m vitlab`` and the ``vitlab`` command: Ctrl-C is handled before anything else is imported."""

from __future__ import annotations

from vitlab import interrupts


def main() -> None:
    """Run the command line."""
    interrupts.install()
    from vitlab.cli import main as run_command

    interrupts.state.left = 2
    try:
        run_command()
    except SystemExit as exit_:
        interrupts.state.reported = exit_.code == interrupts.EXIT_CODE
        raise
    finally:
        interrupts.state.left = 0


if __name__ == "__main__":
    main()
