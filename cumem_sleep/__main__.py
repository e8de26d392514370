"""The command `cumem-sleep`, and `python -m cumem_sleep`: starts before the rest of the package is imported."""

from __future__ import annotations

import sys

_INTERRUPTED = 130  # as a shell reports SIGINT


def main() -> int:
    """Run the command; Ctrl-C ends it without a traceback, even while its modules are being imported."""
    try:
        from .tools.cli import main as run

        return run()
    except KeyboardInterrupt:
        print("cumem-sleep: interrupted", file=sys.stderr)
        return _INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
