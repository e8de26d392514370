"""The command `cumem-sleep`: reads its arguments, shows what a command found, and says so by its exit code."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from .. import __version__, _core, variables
from ..allocator import CuMemAllocator
from ..errors import BackupMismatch, CumemSleepError, InvalidArgument
from ..settings import Settings, parse_bytes
from ..vllm.gate_settings import GateSettings
from . import bench, demo, doctor, vault

EXIT_OK, EXIT_CHECK_FAILED, EXIT_ERROR = 0, 1, 2
EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 130, 141  # as a shell reports SIGINT and SIGPIPE

_WIDTH_WITHOUT_TERMINAL = 120
_LONGEST_PAUSE_S = 3600

_DESCRIPTION = """\
Sleep mode for GPU memory: weights and KV cache give their GPU memory back in
seconds and take it again at the same addresses, in the same process."""

_EPILOG = """\
examples:
  cumem-sleep demo                     sleep and wake a small model, compare every byte
  cumem-sleep demo Qwen3-8B/           the same with a model of yours: a folder, or its files
  cumem-sleep doctor                   is this machine ready, and is it fast
  cumem-sleep doctor --json            the same for a program
  cumem-sleep bench                    what sleep and wake cost here, beside the link

with vLLM:
  vllm serve MODEL --enable-sleep-mode   installing this package is enough
  curl -X POST localhost:8000/sleep      give the memory back (needs VLLM_SERVER_DEV_MODE=1)
  curl -X POST localhost:8000/wake_up    take it again

exit codes:
  0  all is well
  1  a check failed, or bytes differ
  2  bad usage, or an error of this layer (one line on standard error)
  130  interrupted
  141  whoever read the output has closed it

--json of every command begins with command, version, ok, simulated (no GPU was used), and error
(null, or what went wrong).

environment, in order: of the memory layer, of vLLM's HTTP gate, of the plugin and the simulated driver:
"""

_DEMO_DESCRIPTION = """\
Loads a model's weights, makes a KV cache, and takes both through what a server
does: sleep at level 1 (weights are copied to the host, the KV cache is dropped),
wake, sleep again (nothing changed, so nothing is copied), wake the weights, then
the KV cache, sleep at level 2 (both are dropped), wake, reload the weights.

After each wake every byte of the weights is read back from the device and compared
with the source, and every address with the one before.

Without a GPU it runs on the simulated driver, and says so."""

_DEMO_EPILOG = """\
examples:
  cumem-sleep demo
  cumem-sleep demo model.safetensors --kv 8GiB
  cumem-sleep demo Qwen3-8B/
  cumem-sleep demo model-0000*-of-00004.safetensors --device 1 --rounds 3
  CUMEM_SLEEP_DRIVER=sim cumem-sleep demo --json | jq .ok"""

_DOCTOR_DESCRIPTION = """\
Looks at the driver, the GPUs, the host memory and the Python packages, and says
what is wrong or slow and what to do about it. Takes 2 MiB on each GPU for a moment
(and a CUDA context) to find out what is really granted; changes nothing.

A warning costs speed or a feature; a failure means that the layer cannot work."""

_DOCTOR_EPILOG = """\
examples:
  cumem-sleep doctor
  cumem-sleep doctor --json | jq '.checks[] | select(.status != "ok")'
  CUMEM_SLEEP_DRIVER=sim cumem-sleep doctor"""


_BENCH_DESCRIPTION = """\
Measures what sleep and wake cost on this machine, in a process of its own: the link
both ways, the first sleep, sleeps with nothing, one segment or everything changed,
without backups and after prepare(), level 2, and wakes with and without the KV cache,
right after the sleep and some seconds later (the driver wipes freed memory meanwhile).

The weights are the 258 segments of a Qwen3-32B as vLLM has them, scaled; or equal ones
(--segment-size); or a model's (--model). Contents are random. After each wake every byte
of the weights is compared with what it was, outside of the measured time.

Without sizes, those of a 32B model beside vLLM on an H200 are taken, or what fits.
On the simulated driver everything is small, and the times mean nothing."""

_BENCH_EPILOG = """\
examples:
  cumem-sleep bench
  cumem-sleep bench --weights 30GiB --kv 20GiB --plot sleep.png
  cumem-sleep bench --model model.safetensors --rounds 5 --json > bench.json
  cumem-sleep bench --model Qwen3-8B/ --device 1
  cumem-sleep bench --weights 8GiB --segment-size 2MiB
  CUMEM_SLEEP_DRIVER=sim cumem-sleep bench --pause 0

how to read it:
  seconds are medians; "x link" is how many times as long as the link alone would need.
  "first sleep" takes and pins host memory; "prepared sleep" finds that done by "prepare"."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code.

    Raises:
        SystemExit: `--help`, `--version` (0) or bad usage (2), by argparse.
    """
    if sys.stdout is None:
        _say_error("standard output is closed: there is nowhere to show what is found")
        return EXIT_ERROR
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that knows no "✓" gets "?"
    parser = _parser()
    options = parser.parse_args(arguments)
    options.command_line = ["cumem-sleep", *(sys.argv[1:] if arguments is None else arguments)]
    if options.run is None:
        parser.print_help(sys.stderr)
        return EXIT_ERROR
    try:
        code: int = options.run(options)
        sys.stdout.flush()
        return code
    except CumemSleepError as error:
        _say_error(str(error))
        if options.json and not options.shown:
            _print_json(options, _core.driver_is_simulated(), str(error), {})
        return EXIT_CHECK_FAILED if isinstance(error, BackupMismatch) else EXIT_ERROR
    except KeyboardInterrupt:
        _say_error("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # whoever read our output has seen enough
        _write_no_more()
        return EXIT_BROKEN_PIPE
    except OSError as error:  # a full disk, say
        _say_error(str(error))
        _write_no_more()
        return EXIT_ERROR


def _write_no_more() -> None:
    """Python would try once more at exit."""
    with suppress(OSError, ValueError):  # a stream that has no descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    def new(make: Callable[..., Any], *names: str, **texts: str) -> Any:
        return make(*names, formatter_class=argparse.RawDescriptionHelpFormatter, **texts)

    parser = new(
        argparse.ArgumentParser, prog="cumem-sleep", description=_DESCRIPTION, epilog=_EPILOG + _environment_help()
    )
    parser.add_argument("--version", action="version", version=f"cumem-sleep {__version__}")
    parser.set_defaults(run=None, shown=False)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    text = "sleep and wake a model, and compare every byte"
    command = new(commands.add_parser, "demo", help=text, description=_DEMO_DESCRIPTION, epilog=_DEMO_EPILOG)
    command.add_argument(
        "models",
        nargs="*",
        type=_path,
        metavar="PATH",
        help="the weights: a model's folder, or its safetensors files; without any, a small made-up model (193 MiB)",
    )
    command.add_argument("--device", type=int, default=0, metavar="N", help="CUDA ordinal (default: 0)")
    command.add_argument(
        "--kv",
        type=_size,
        default=demo.DEFAULT_KV_BYTES,
        metavar="SIZE",
        help="size of the KV cache, as 8GiB or 500MB (default: 256MiB)",
    )
    command.add_argument(
        "--rounds", type=_count, default=1, metavar="N", help="how often to go through all of it (default: 1)"
    )
    command.set_defaults(run=_demo, command="demo")

    text = "what sleep and wake cost on this machine, beside the link"
    bench_command = new(commands.add_parser, "bench", help=text, description=_BENCH_DESCRIPTION, epilog=_BENCH_EPILOG)
    _add_bench_options(bench_command)
    bench_command.set_defaults(run=_bench, command="bench")

    text = "is this machine ready, and is it fast"
    doctor_command = new(
        commands.add_parser, "doctor", help=text, description=_DOCTOR_DESCRIPTION, epilog=_DOCTOR_EPILOG
    )
    doctor_command.set_defaults(run=_doctor, command="doctor")
    vault.add_command(new, commands, _size, _path, _vault, _vault_status)
    for each in (command, bench_command, doctor_command):
        each.add_argument("--json", action="store_true", help="print JSON (progress goes to standard error)")
    parsed: argparse.ArgumentParser = parser
    return parsed


def _environment_help() -> str:
    """Every variable with its meaning, from the docstrings of the settings."""
    texts = {**variables.described(Settings), **variables.described(GateSettings), **variables.OTHERS}
    lines = []
    for name, text in texts.items():
        lines += [f"  {name}", *textwrap.wrap(text, 100, initial_indent="      ", subsequent_indent="      ")]
    return "\n".join(lines)


def _add_bench_options(command: argparse.ArgumentParser) -> None:
    sizes = (
        ("--weights", "of all weights, as 30GiB or 500MB (default: what the description says)"),
        ("--kv", "of the KV cache (default: likewise)"),
        ("--segment-size", "all weights in equal segments of this size, a multiple of 2MiB"),
    )
    for option, text in sizes:
        command.add_argument(option, type=_size, metavar="SIZE", help=text)
    command.add_argument(
        "--model",
        nargs="+",
        type=_path,
        default=[],
        metavar="PATH",
        help="segments for the tensors of a model's folder, or of its safetensors files; only headers are read",
    )
    command.add_argument("--rounds", type=_count, default=3, metavar="N", help="how often each step runs (default: 3)")
    command.add_argument("--device", type=int, default=0, metavar="N", help="CUDA ordinal (default: 0)")
    command.add_argument(
        "--pause", type=_seconds, default=3.0, metavar="S", help="seconds before the later wakes (default: 3)"
    )
    command.add_argument(
        "--touch-host-memory",
        action=argparse.BooleanOptionalAction,
        help="use host memory once before measuring: virtual machines give it slowly at first"
        " (default: on a GPU yes, simulated no)",
    )
    command.add_argument("--plot", type=_path, metavar="FILE", help="draw the seconds (.png, .svg, .pdf; matplotlib)")


def _size(text: str) -> int:
    try:
        nbytes = parse_bytes("size", text)
    except InvalidArgument as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if nbytes < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: at least one byte is allowed")
    return nbytes


def _path(text: str) -> Path:
    if not text:  # a shell variable that is not set; Path takes it for the current folder
        raise argparse.ArgumentTypeError(f"{text!r}: the name of a file or folder is wanted")
    return Path(text)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number from 1 is allowed")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= _LONGEST_PAUSE_S:
        raise argparse.ArgumentTypeError(f"{text!r}: seconds from 0 to {_LONGEST_PAUSE_S} are allowed")
    return seconds


# Commands


def _demo(options: argparse.Namespace) -> int:
    with _progress() as progress:
        progress("look at the weights", 0, 0)
        source = demo.source_from_files(options.models) if options.models else demo.synthetic_source()
        weights = demo.lay_out(source.tensors)
        allocator = _open_allocator()
        if _core.driver_is_simulated():
            demo.make_room(os.environ, weights, options.kv)
        report = demo.run(
            allocator,
            source,
            weights,
            device=options.device,
            kv_bytes=options.kv,
            rounds=options.rounds,
            progress=progress,
        )
    if options.json:
        _print_json(options, report.simulated, report.error, report.to_json())
    else:
        _print(report.headline(), report.table(), report.conclusion())
        if report.simulated:
            _print(demo.SIMULATED_NOTE)
    return EXIT_OK if report.ok else EXIT_CHECK_FAILED


def _bench(options: argparse.Namespace) -> int:
    if options.plot is not None:
        bench.check_plot(options.plot)
    request = bench.Request(options.weights, options.kv, options.segment_size, tuple(options.model))
    with _progress() as progress:
        allocator = _open_allocator()
        if _core.driver_is_simulated():
            bench.enlarge_simulated_device(os.environ)
        room = bench.Room.now(options.device, allocator.settings)
        workload = bench.plan(request, room)
        if workload.why:
            _say(f"{'simulated: ' if room.simulated else ''}{workload.why}", style="")
        touch = not room.simulated if options.touch_host_memory is None else options.touch_host_memory
        how = bench.Options(options.device, options.rounds, options.pause, touch, options.command_line)
        report = bench.run(allocator, workload, room, how, progress)
    if options.json:
        _print_json(options, report.simulated, report.error, report.to_json())
    else:
        _print(report.headline(), report.table(), report.conclusion())
        if room.simulated:
            _print(bench.SIMULATED_NOTE)
    if options.plot is not None:  # last: should it fail, nothing that was measured is lost
        bench.draw(report, options.plot)
        _say(f"{'simulated: ' if room.simulated else ''}wrote {options.plot}", style="")
    return EXIT_OK if report.ok else EXIT_CHECK_FAILED


def _doctor(options: argparse.Namespace) -> int:
    with _progress() as progress:
        report = doctor.examine(doctor.Machine(), lambda name: progress(name, 0, 0))
    if options.json:
        _print_json(options, report.simulated, report.error, report.to_json())
    else:
        _print(report.table(), report.conclusion())
        if report.simulated:
            _print(doctor.SIMULATED_NOTE)
    return EXIT_OK if report.ok else EXIT_CHECK_FAILED


def _vault(options: argparse.Namespace) -> int:
    if options.memory is None:
        raise InvalidArgument("--memory is missing: how much host memory the vault takes, as --memory 200GiB")
    vault.serve(options, lambda line: _say(f"cumem-sleep vault: {line}", style=""))
    return EXIT_OK


def _vault_status(options: argparse.Namespace) -> int:
    status = vault.status(options)
    if options.prometheus:
        sys.stdout.write(status.prometheus())
    elif options.json:
        _print_json(options, status.simulated, None, status.to_json())
    else:
        _print(status.headline(), *status.tables(), *filter(None, [status.conclusion()]))
    return EXIT_OK


def _open_allocator() -> CuMemAllocator:
    allocator, why_simulated = demo.open_allocator(os.environ)
    if why_simulated:
        _say(f"{why_simulated}: running on the simulated driver (CUMEM_SLEEP_DRIVER=cuda insists on a GPU)")
    return allocator


# Output


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Rich would exit with 1 here, which means that a check failed."""
        raise BrokenPipeError


def _console(stderr: bool = False) -> Console:
    console = _Console(stderr=stderr, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _WIDTH_WITHOUT_TERMINAL
    return console


def _print(*things: RenderableType) -> None:
    console = _console()
    for thing in things:
        console.print(thing, markup=False)


def _print_json(options: argparse.Namespace, simulated: bool, error: str | None, facts: Mapping[str, object]) -> None:
    """One object, whatever the command, that begins alike; printed once."""
    options.shown = True
    common = {
        "command": options.command,
        "version": __version__,
        "ok": error is None,
        "simulated": simulated,
        "error": error,
    }
    print(json.dumps({**common, **facts}, indent=2))


def _say(text: str, style: str = "yellow") -> None:
    """One line on standard error."""
    _console(stderr=True).print(" ".join(text.split()), style=style, markup=False, soft_wrap=True)


def _say_error(text: str) -> None:
    where = " [simulated]" if _core.driver_is_simulated() else ""
    _say(f"cumem-sleep{where}: {text}", style="bold red")


@contextmanager
def _progress() -> Iterator[demo.Progress]:
    """A bar on standard error while work goes on; nothing where that is not a terminal."""
    console = _console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def show(what: str, done: int, total: int) -> None:
            mark = "simulated: " if _core.driver_is_simulated() else ""
            bar.update(task, description=mark + what, completed=done, total=total or None)

        yield show
