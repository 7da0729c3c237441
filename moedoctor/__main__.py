"""Starts the command line. Signals are handled before anything else is imported."""

import sys

from moedoctor.processes import interrupts


def main() -> int:
    """Run the command line as a program and return its exit code."""
    interrupts.install()
    try:
        from moedoctor.cli import main

        return main()
    finally:
        interrupts.block()


if __name__ == "__main__":
    sys.exit(main())
