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
from typing import Any, NoReturn, Protocol

from rich.console import RenderableType

from .. import __version__, _core
from ..allocator import CuMemAllocator
from ..core.misspelt import warn_of_misspelt
from ..errors import BackupMismatch, CumemSleepError, InvalidArgument
from ..settings import parse_bytes
from . import bench, demo, doctor, help_texts, serve, shim, simulated, vault
from .console import one_line, print_all, progress_bar, say, tell
from .layout import lay_out
from .machine import Machine
from .simulated import SIMULATED_NOTE

EXIT_OK, EXIT_CHECK_FAILED, EXIT_ERROR = 0, 1, 2
EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 130, 141  # as a shell reports SIGINT and SIGPIPE

_LONGEST_PAUSE_S = 3600


class _BadUsage(Exception):
    """Arguments that the parser of a command does not take."""

    def __init__(self, parser: argparse.ArgumentParser, message: str) -> None:
        super().__init__(message)
        self.parser = parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Leave to `main` what argparse would print itself, and never as JSON."""
        raise _BadUsage(self, message)


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
    parser = _parser()
    given = sys.argv[1:] if arguments is None else arguments
    try:
        options = parser.parse_args(given)
    except _BadUsage as error:
        _refuse(error, given)
    options.command_line = ["cumem-sleep", *given]
    if options.run is None:
        print(help_texts.SHORT, file=sys.stderr)
        return EXIT_ERROR
    warn_of_misspelt()
    try:
        code: int = options.run(options)
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


def _refuse(error: _BadUsage, given: Sequence[str]) -> NoReturn:
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


def _parser() -> argparse.ArgumentParser:
    def new(make: Callable[..., Any], *names: str, **texts: str) -> Any:
        return make(*names, formatter_class=argparse.RawDescriptionHelpFormatter, **texts)

    parser = new(
        _Parser,
        prog="cumem-sleep",
        description=help_texts.DESCRIPTION,
        epilog=help_texts.EPILOG + help_texts.environment(),
    )
    parser.add_argument("--version", action="version", version=_build())
    parser.set_defaults(run=None, shown=False)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    text = "sleep and wake a model, and compare every byte"
    command = new(
        commands.add_parser, "demo", help=text, description=help_texts.DEMO_DESCRIPTION, epilog=help_texts.DEMO_EPILOG
    )
    command.add_argument(
        "models",
        nargs="*",
        type=_path,
        metavar="PATH",
        help="the weights: a model's folder, or its safetensors files (default: a small random model, 193 MiB)",
    )
    command.add_argument("--device", type=int, default=0, metavar="N", help="CUDA ordinal (default: 0)")
    command.add_argument(
        "--kv",
        type=_size,
        default=demo.DEFAULT_KV_BYTES,
        metavar="SIZE",
        help="size of the KV cache, such as 8GiB or 500MB (default: 256MiB)",
    )
    command.add_argument(
        "--rounds", type=_count, default=1, metavar="N", help="how often to repeat all steps (default: 1)"
    )
    command.set_defaults(run=_demo, command="demo")

    text = "measure sleep and wake on this machine, compared with the link"
    bench_command = new(
        commands.add_parser,
        "bench",
        help=text,
        description=help_texts.BENCH_DESCRIPTION,
        epilog=help_texts.BENCH_EPILOG,
    )
    _add_bench_options(bench_command)
    bench_command.set_defaults(run=_bench, command="bench")

    text = "check whether this machine is ready, and fast"
    doctor_command = new(
        commands.add_parser,
        "doctor",
        help=text,
        description=help_texts.DOCTOR_DESCRIPTION,
        epilog=help_texts.DOCTOR_EPILOG,
    )
    doctor_command.set_defaults(run=_doctor, command="doctor")
    text = "print the folder of a package that puts this layer in another's place"
    shim_command = new(
        commands.add_parser, "shim", help=text, description=help_texts.SHIM_DESCRIPTION, epilog=help_texts.SHIM_EPILOG
    )
    shim_command.add_argument("package", choices=sorted(shim.FOLDERS), help="whose interface it has")
    shim_command.set_defaults(run=_shim, command="shim")
    text = "explain a topic, as the settings"
    help_command = new(commands.add_parser, "help", help=text, description=help_texts.HELP_DESCRIPTION)
    help_command.add_argument("topic", nargs="?", choices=["settings"], help="without one: as --help")
    help_command.set_defaults(run=lambda options: _explain(parser, options.topic), command="help", json=False)
    vault.add_command(new, commands, _size, _path, _vault, _vault_status)
    serve.add_commands(new, commands, _path, _serve, _ask)
    for each in (command, bench_command, doctor_command, shim_command):
        each.add_argument("--json", action="store_true", help="print JSON (progress goes to standard error)")
    parsed: argparse.ArgumentParser = parser
    return parsed


def _build() -> str:
    """The version, the commit, and what the extension was built with. Built in place, its commit changes."""
    commit = (Path(__file__).parent.parent / "commit.txt").read_text().strip()
    known = "a checkout" if commit.startswith("$") else f"commit {commit}"
    return f"cumem-sleep {__version__} ({known}; {_core.BUILT_WITH})"


def _explain(parser: argparse.ArgumentParser, topic: str | None) -> int:
    if topic is None:
        parser.print_help()
    else:
        print(help_texts.environment(tests=True))
    return 0


def _add_bench_options(command: argparse.ArgumentParser) -> None:
    sizes = (
        ("--weights", "total size of the weights, such as 30GiB or 500MB (default: see above)"),
        ("--kv", "size of the KV cache (default: see above)"),
        ("--segment-size", "put all weights in equal segments of this size, a multiple of 2MiB"),
    )
    for option, text in sizes:
        command.add_argument(option, type=_size, metavar="SIZE", help=text)
    command.add_argument(
        "--model",
        nargs="+",
        type=_path,
        default=[],
        metavar="PATH",
        help="lay segments out for the tensors of a model's folder, or of its safetensors files; only headers are read",
    )
    command.add_argument(
        "--rounds", type=_count, default=3, metavar="N", help="how often to run each step (default: 3)"
    )
    command.add_argument("--device", type=int, default=0, metavar="N", help="CUDA ordinal (default: 0)")
    command.add_argument(
        "--pause", type=_seconds, default=3.0, metavar="S", help="seconds before the later wakes (default: 3)"
    )
    command.add_argument(
        "--touch-host-memory",
        action=argparse.BooleanOptionalAction,
        help="prefault host memory before measuring, since virtual machines hand it out slowly at first"
        " (default: yes on a GPU, no on the simulated driver)",
    )
    command.add_argument(
        "--level",
        type=int,
        choices=[3],
        help="measure what level 3 adds to level 1, instead of all that is listed above",
    )
    command.add_argument(
        "--plot", type=_path, metavar="FILE", help="plot the seconds (.png, .svg, .pdf; needs matplotlib)"
    )


def _size(text: str) -> int:
    try:
        nbytes = parse_bytes("size", text)
    except InvalidArgument as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if nbytes < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected at least one byte")
    return nbytes


def _path(text: str) -> Path:
    if not text:  # for example an unset shell variable; Path would take it for the current folder
        raise argparse.ArgumentTypeError(f"{text!r}: expected the name of a file or folder")
    return Path(text)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of at least 1")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= _LONGEST_PAUSE_S:
        raise argparse.ArgumentTypeError(f"{text!r}: expected seconds from 0 to {_LONGEST_PAUSE_S}")
    return seconds


# Commands


def _demo(options: argparse.Namespace) -> int:
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
    return _show(options, report, SIMULATED_NOTE, report.headline(), report.table(), report.conclusion())


def _bench(options: argparse.Namespace) -> int:
    if options.plot is not None:
        bench.check_plot(options.plot)
    request = bench.Request(options.weights, options.kv, options.segment_size, tuple(options.model))
    with progress_bar() as progress:
        allocator = _open_allocator()
        if _core.driver_is_simulated():
            simulated.enlarge_device(os.environ)
        room = bench.Room.now(options.device, allocator.settings)
        workload = bench.plan(request, room)
        if workload.why:
            say(f"{'simulated: ' if room.simulated else ''}{workload.why}", style="")
        touch = not room.simulated if options.touch_host_memory is None else options.touch_host_memory
        deep = options.level == 3
        how = bench.BenchOptions(options.device, options.rounds, options.pause, touch, deep, options.command_line)
        report = bench.run(allocator, workload, room, how, progress)
    code = _show(options, report, SIMULATED_NOTE, report.headline(), report.table(), report.conclusion())
    if options.plot is not None:  # last, so that a failure loses no measurement
        bench.draw(report, options.plot)
        say(f"{'simulated: ' if room.simulated else ''}wrote {options.plot}", style="")
    return code


def _doctor(options: argparse.Namespace) -> int:
    with progress_bar() as progress:
        report = doctor.examine(Machine(), lambda name: progress(name, 0, 0))
    return _show(options, report, doctor.SIMULATED_NOTE, report.table(), report.conclusion())


def _shim(options: argparse.Namespace) -> int:
    folder = shim.FOLDERS[options.package]
    if options.json:
        _print_json(options, False, None, {"package": options.package, "folder": str(folder)})
    else:
        print(folder)
    return EXIT_OK


def _vault(options: argparse.Namespace) -> int:
    if options.memory is None:
        raise InvalidArgument(
            "--memory is missing: it says how much host memory the vault takes, for example --memory 200GiB"
        )
    vault.serve(options, lambda line: tell(f"cumem-sleep vault: {line}"))
    return EXIT_OK


def _vault_status(options: argparse.Namespace) -> int:
    status = vault.status(options)
    if options.prometheus:
        sys.stdout.write(status.prometheus())
    elif options.json:
        _print_json(options, status.simulated, None, status.to_json())
    else:
        print_all(status.headline(), *status.tables(), *filter(None, [status.conclusion()]))
    return EXIT_OK


def _serve(options: argparse.Namespace) -> int:
    if not options.check:
        serve.serve(options, lambda line: tell(f"cumem-sleep serve: {line}"))
        return EXIT_OK
    table, problems = serve.check(options)
    print_all(table, *([] if problems else [f"{options.config} is valid"]))
    for problem in problems:
        _say_error(problem)
    return EXIT_ERROR if problems else EXIT_OK


def _ask(options: argparse.Namespace) -> int:
    found = serve.ask(options)
    if options.json:
        _print_json(options, bool(found.pop("simulated", False)), None, found)
    else:
        print_all(*serve.tables(options, found))
    return EXIT_OK


def _open_allocator() -> CuMemAllocator:
    allocator, why_simulated = simulated.open_allocator(os.environ)
    if why_simulated:
        say(f"{why_simulated}: running on the simulated driver (CUMEM_SLEEP_DRIVER=cuda insists on a GPU)")
    return allocator


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
