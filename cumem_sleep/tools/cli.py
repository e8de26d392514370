"""The command `cumem-sleep`: parses its arguments, runs a command, and reports the result, also as exit code."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from .. import __version__, _core
from ..core.misspelt import warn_of_misspelt
from ..errors import BackupMismatch, CumemSleepError, InvalidArgument
from . import help_texts
from .console import one_line, print_all, progress_bar, say, tell
from .options import BadUsage, parser

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..allocator import CuMemAllocator

EXIT_OK, EXIT_CHECK_FAILED, EXIT_ERROR = 0, 1, 2
EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 130, 141  # as a shell reports SIGINT and SIGPIPE


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code.

    Raises:
        SystemExit: `--help`, `--version` (0) or bad usage (2), as with argparse.
    """
    if sys.stdout is None:
        _say_error("standard output is closed: there is nowhere to print the result")
        return EXIT_ERROR
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without "✓" gets "?"
    given = sys.argv[1:] if arguments is None else arguments
    try:
        options = parser(_build()).parse_args(given, argparse.Namespace(shown=False))
    except BadUsage as error:
        _refuse(error, given)
    options.command_line = ["cumem-sleep", *given]
    if options.command is None:
        print(help_texts.WHOLE, file=sys.stderr)
        return EXIT_ERROR
    warn_of_misspelt()
    try:
        code = _COMMANDS[options.command](options)
        sys.stdout.flush()
        return code
    except CumemSleepError as error:
        _end(options, str(error))
        return EXIT_CHECK_FAILED if isinstance(error, BackupMismatch) else EXIT_ERROR
    except KeyboardInterrupt:
        _end(options, "interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader has seen enough
        _write_no_more()
        return EXIT_BROKEN_PIPE
    except OSError as error:  # for example a full disk
        _end(options, str(error))
        _write_no_more()
        return EXIT_ERROR


def _refuse(error: BadUsage, given: Sequence[str]) -> NoReturn:
    """Say what is wrong with the arguments as argparse does, and as JSON if they want that."""
    error.parser.print_usage(sys.stderr)
    print(f"{error.parser.prog}: error: {one_line(str(error))}", file=sys.stderr)
    if "--json" in given:
        command = error.parser.prog.partition(" ")[2] or None
        _print_error(argparse.Namespace(command=command), str(error))
    raise SystemExit(EXIT_ERROR)


def _end(options: argparse.Namespace, error: str) -> None:
    """Say why a command has ended early, in a line and, if it was to print JSON and has not, as JSON."""
    _say_error(error)
    if options.json and not options.shown:
        _print_error(options, error)


def _print_error(options: argparse.Namespace, error: str) -> None:
    """As JSON, unless nobody takes it: the exit code says the same."""
    try:
        _print_json(options, _core.driver_is_simulated(), error, {})
        sys.stdout.flush()
    except OSError:
        _write_no_more()


def _write_no_more() -> None:
    """Redirect standard output to nowhere: otherwise Python would try to write the same again at exit."""
    with suppress(OSError, ValueError):  # a stream that has no descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _build() -> str:
    """The version, the commit, and what the extension was built with. Built in place, its commit changes."""
    commit = (Path(__file__).parent.parent / "commit.txt").read_text().strip()
    known = "a checkout" if commit.startswith("$") else f"commit {commit}"
    return f"cumem-sleep {__version__} ({known}; {_core.BUILT_WITH})"


# Commands


def _demo(options: argparse.Namespace) -> int:
    from . import demo, simulated
    from .layout import lay_out

    with progress_bar() as progress:
        progress("read the headers", 0, 0)
        source = demo.source_from_files(options.models) if options.models else demo.synthetic_source()
        weights = lay_out(source.tensors)
        allocator = _open_allocator()
        if _core.driver_is_simulated():
            simulated.make_room(os.environ, weights, options.kv)
        report = demo.run(
            allocator,
            source,
            weights,
            device=options.device,
            kv_bytes=options.kv,
            rounds=options.rounds,
            progress=progress,
        )
    return _show(options, report, simulated.SIMULATED_NOTE, report.headline(), report.table(), report.conclusion())


def _bench(options: argparse.Namespace) -> int:
    from . import bench, simulated

    with progress_bar() as progress:
        allocator = _open_allocator()
        if _core.driver_is_simulated():
            simulated.enlarge_device(os.environ)
        room = bench.Room.now(options.device, allocator.settings)
        workload = bench.plan(options.weights, options.kv, options.segment_size, room)
        if workload.why:
            say(f"{'simulated: ' if room.simulated else ''}{workload.why}", style="")
        how = bench.BenchOptions(
            options.device, options.rounds, options.pause, options.level == 3, options.command_line
        )
        report = bench.run(allocator, workload, room, how, progress)
    return _show(options, report, simulated.SIMULATED_NOTE, report.headline(), report.table(), report.conclusion())


def _doctor(options: argparse.Namespace) -> int:
    from . import doctor
    from .machine import Machine

    with progress_bar() as progress:
        report = doctor.examine(Machine(), lambda name: progress(name, 0, 0))
    return _show(options, report, doctor.SIMULATED_NOTE, report.table(), report.conclusion())


def _shim(options: argparse.Namespace) -> int:
    from .shim import FOLDERS

    folder = FOLDERS[options.package]
    if options.json:
        _print_json(options, False, None, {"package": options.package, "folder": str(folder)})
    else:
        print(folder)
    return EXIT_OK


def _help(options: argparse.Namespace) -> int:
    if options.topic is None:
        print(help_texts.WHOLE)
    else:
        print(help_texts.keys() if options.topic == "models.yaml" else help_texts.environment())
    return EXIT_OK


def _vault(options: argparse.Namespace) -> int:
    from . import vault

    if options.memory is None:
        raise InvalidArgument(
            "--memory is missing: it says how much host memory the vault takes, for example --memory 200GiB"
        )
    vault.serve(options, lambda line: tell(f"cumem-sleep vault: {line}"))
    return EXIT_OK


def _vault_status(options: argparse.Namespace) -> int:
    from . import vault

    status = vault.look(options.socket)
    if options.prometheus:
        sys.stdout.write(status.prometheus())
    elif options.json:
        _print_json(options, status.simulated, None, status.to_json())
    else:
        print_all(status.headline(), *status.tables(), *filter(None, [status.conclusion()]))
    return EXIT_OK


def _vault_forget(options: argparse.Namespace) -> int:
    from . import vault

    vault.forget(options.socket, options.name)
    return EXIT_OK


def _serve(options: argparse.Namespace) -> int:
    from . import serve

    if not options.check:
        serve.serve(options, lambda line: tell(f"cumem-sleep serve: {line}"))
        return EXIT_OK
    table, more, problems = serve.check(options)
    print_all(table, *more, *([] if problems else [f"{options.config} is valid"]))
    for problem in problems:
        _say_error(problem)
    return EXIT_ERROR if problems else EXIT_OK


def _ask(options: argparse.Namespace) -> int:
    from . import serve

    found = serve.ask(options)
    if options.json:
        _print_json(options, bool(found.pop("simulated", False)), None, found)
    else:
        print_all(*serve.tables(options, found))
    return EXIT_OK


def _open_allocator() -> CuMemAllocator:
    from . import simulated

    allocator, why_simulated = simulated.open_allocator(os.environ)
    if why_simulated:
        say(f"{why_simulated}: running on the simulated driver (CUMEM_SLEEP_DRIVER=cuda insists on a GPU)")
    return allocator


_COMMANDS: Mapping[str, Callable[[argparse.Namespace], int]] = {
    "demo": _demo,
    "bench": _bench,
    "doctor": _doctor,
    "shim": _shim,
    "help": _help,
    "vault": _vault,
    "vault status": _vault_status,
    "vault forget": _vault_forget,
    "serve": _serve,
    **dict.fromkeys(("status", "sleep", "wake", "stop", "drain"), _ask),
}


# Output


class _Report(Protocol):
    @property
    def simulated(self) -> bool: ...
    @property
    def error(self) -> str | None: ...
    def to_json(self) -> dict[str, Any]: ...


def _show(options: argparse.Namespace, report: _Report, note: str, *parts: RenderableType) -> int:
    """Print what a command found, as JSON or in these parts (and the note if simulated); returns the exit code."""
    if options.json:
        _print_json(options, report.simulated, report.error, report.to_json())
    else:
        print_all(*parts, *([note] if report.simulated else []))
    return EXIT_OK if report.error is None else EXIT_CHECK_FAILED


def _print_json(options: argparse.Namespace, simulated: bool, error: str | None, facts: Mapping[str, object]) -> None:
    """Print one object, which begins in the same way for every command; at most once."""
    options.shown = True
    common = {
        "command": options.command,
        "version": __version__,
        "ok": error is None,
        "simulated": simulated,
        "error": error,
    }
    print(json.dumps({**common, **facts}, indent=2))


def _say_error(text: str) -> None:
    where = " [simulated]" if _core.driver_is_simulated() else ""
    say(f"cumem-sleep{where}: {text}", style="bold red")
