"""Which of the interpreters of this process runs the code."""

from __future__ import annotations

import sys


def is_main_interpreter() -> bool:
    """False in a subinterpreter."""
    if sys.version_info >= (3, 13):
        from _thread import _is_main_interpreter

        return _is_main_interpreter()
    try:
        import _xxsubinterpreters as interpreters
    except ImportError:  # a Python built without them
        return True
    return bool(interpreters.get_current() == interpreters.get_main())
