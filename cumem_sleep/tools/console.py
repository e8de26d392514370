"""The terminal: reports go to standard output, messages and the progress bar to standard error."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar
from rich.text import Text

from .. import _core

_WIDTH_WITHOUT_TERMINAL = 120

Progress = Callable[[str, int, int], None]
"""Called with the current step, the bytes done and their total (0 and 0: not known)."""


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise, where Rich would exit with 1, which means that a check failed."""
        raise BrokenPipeError

    def render_str(self, text: str, **options: Any) -> Text:
        """Rich itself lets most control characters through."""
        return super().render_str("\n".join(map(one_line, text.split("\n"))), **options)


def one_line(text: str) -> str:
    """A text that may be anybody's on one line, as Python escapes it: no terminal obeys it, and no line is forged."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def _console(stderr: bool = False) -> Console:
    console = _Console(stderr=stderr, highlight=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _WIDTH_WITHOUT_TERMINAL
    return console


def print_all(*things: RenderableType) -> None:
    """Tables and text, to standard output."""
    console = _console()
    for thing in things:
        console.print(thing, markup=False)


def say(text: str, style: str = "yellow") -> None:
    """One line on standard error."""
    _console(stderr=True).print(" ".join(text.split()), style=style, markup=False, soft_wrap=True)


def tell(text: str) -> None:
    """A line of a long work on standard error, as `say`, which the work survives when nobody reads it any more."""
    try:
        say(text, style="")
    except OSError:  # the exit would try to write the same again, and fail
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stderr.fileno())
            os.close(nowhere)


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A bar on standard error while work is going on; nothing if that is not a terminal."""
    console = _console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with ProgressBar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def show(what: str, done: int, total: int) -> None:
            mark = "simulated: " if _core.driver_is_simulated() else ""
            bar.update(task, description=mark + what, completed=done, total=total or None)

        yield show
