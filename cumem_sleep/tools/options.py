"""The commands' arguments. Nothing that runs a command is imported for them, so that `--help` answers at once."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NoReturn

from ..errors import InvalidArgument
from ..settings import BYTES
from . import help_texts

_LONGEST_PAUSE_S = 3600


class BadUsage(Exception):
    """Arguments that the parser of a command does not take."""

    def __init__(self, parser: argparse.ArgumentParser, message: str) -> None:
        super().__init__(message)
        self.parser = parser


class _Parser(argparse.ArgumentParser):
    def __init__(self, text: str = "", **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        self._text = text

    def format_help(self) -> str:
        """The text that was given, or one of the arguments."""
        return f"{self._text}\n" if self._text else super().format_help()

    def error(self, message: str) -> NoReturn:
        """Leave to `main` what argparse would print itself, and never as JSON."""
        raise BadUsage(self, message)


def parser(version: str) -> argparse.ArgumentParser:
    """The parser of `cumem-sleep`. What it parses has the command's name, such as `vault status`, in `command`.

    Args:
        version: what `--version` prints.
    """
    whole = _Parser(prog="cumem-sleep", text=help_texts.WHOLE)
    whole.add_argument("--version", action="version", version=version)
    whole.set_defaults(command=None, json=False)
    commands = whole.add_subparsers(title="commands", metavar="COMMAND")
    _add_demo(commands)
    _add_bench(commands)
    _add(commands, "doctor", "check whether this machine is ready, and fast", json=True)
    shim = _add(commands, "shim", "print the folder of a package that puts this layer in another's place", json=True)
    shim.add_argument("package", choices=["torch_memory_saver"], help="whose interface it has")
    topic = _add(commands, "help", "explain a topic, as the settings")
    topic.add_argument("topic", nargs="?", choices=["settings", "models.yaml"], help="without one: as --help")
    _add_vault(commands)
    _add_serve(commands)
    _add_clients(commands)
    return whole


def _add(commands: Any, name: str, text: str, command: str = "", json: bool = False) -> Any:
    """Add a command, with its texts in `help_texts`.

    Args:
        command: its name in `options.command`, if that is another.
    """
    command = command or name
    texts = command.replace(" ", "_").upper()
    described = getattr(help_texts, f"{texts}_DESCRIPTION", f"{text[0].upper()}{text[1:]}.")
    epilog = getattr(help_texts, f"{texts}_EPILOG", None)
    added = commands.add_parser(name, help=text, description=described, epilog=epilog)
    added.set_defaults(command=command)
    if json:
        added.add_argument("--json", action="store_true", help="print JSON (progress goes to standard error)")
    return added


def _add_demo(commands: Any) -> None:
    command = _add(commands, "demo", "sleep and wake a model, and compare every byte", json=True)
    text = "the weights: a model's folder, or its safetensors files (default: a small random model, 193 MiB)"
    command.add_argument("models", nargs="*", type=_path, metavar="PATH", help=text)
    _add_device(command)
    text = "size of the KV cache, such as 8GiB or 500MB (default: 256MiB)"
    command.add_argument("--kv", type=_size, default=256 << 20, metavar="SIZE", help=text)
    text = "how often to repeat all steps (default: 1)"
    command.add_argument("--rounds", type=_count, default=1, metavar="N", help=text)


def _add_bench(commands: Any) -> None:
    command = _add(commands, "bench", "measure sleep and wake on this machine, compared with the link", json=True)
    text = "total size of the weights, such as 30GiB or 500MB (default: see above)"
    command.add_argument("--weights", type=_size, metavar="SIZE", help=text)
    command.add_argument("--kv", type=_size, metavar="SIZE", help="size of the KV cache (default: see above)")
    text = "put all weights in equal segments of this size, a multiple of 2MiB"
    command.add_argument("--segment-size", type=_size, metavar="SIZE", help=text)
    text = "how often to run each step (default: 3)"
    command.add_argument("--rounds", type=_count, default=3, metavar="N", help=text)
    _add_device(command)
    text = "seconds before the later wakes (default: 3)"
    command.add_argument("--pause", type=_seconds, default=3.0, metavar="S", help=text)
    text = "measure what level 3 adds to level 1, instead of all that is listed above"
    command.add_argument("--level", type=int, choices=[3], help=text)


def _add_device(command: Any) -> None:
    command.add_argument("--device", type=int, default=0, metavar="N", help="CUDA ordinal (default: 0)")


def _add_vault(commands: Any) -> None:
    command = _add(commands, "vault", "keep the backups of all processes of this host")
    text = "how much host memory to take, as 200GiB (needed to run it)"
    command.add_argument("--memory", type=_size, metavar="SIZE", help=text)
    socket_text = "where clients find it (default: $XDG_RUNTIME_DIR/cumem-sleep/vault.sock, or in /tmp without that)"
    command.add_argument("--socket", type=_path, metavar="PATH", help=socket_text)
    text = "the GPUs to serve, by CUDA ordinal or UUID, all prepared at the start (default: all, of which the first is)"
    command.add_argument("--gpus", nargs="+", default=[], metavar="GPU", help=text)
    text = "whose links carry copies for other GPUs, over NVLink: those of all GPUs that the vault uses already (auto,"
    text += " default), none (off), or those of these GPUs, by CUDA ordinal or UUID, which it prepares at the start"
    command.add_argument("--relay", nargs="+", default=["auto"], metavar="GPU", help=text)
    text = "take memory in slabs of this size (default: 1.00 GiB, or more with much memory)"
    command.add_argument("--slab-size", type=_size, metavar="SIZE", help=text)
    text = "serve Prometheus metrics at http://HOST:PORT/metrics (HOST by default 127.0.0.1; port 0: any that is free)"
    command.add_argument("--metrics", type=_address, metavar="[HOST:]PORT", help=text)
    text = "take the huge pages that the system has reserved (vm.nr_hugepages) first, and other memory after them"
    command.add_argument("--reserved-huge-pages", action="store_true", help=text)
    text = "spill what sleeps longest to files in this folder, when memory runs short; only this user may enter it"
    command.add_argument("--spill", type=_path, metavar="DIR", help=text)
    text = "how much the files may hold (needed with --spill)"
    command.add_argument("--spill-size", type=_size, metavar="SIZE", help=text)
    text = "spill in the background so that this much memory is free, or can be at once (default: 0)"
    command.add_argument("--spill-free", type=_size, metavar="SIZE", help=text)
    text = "keep up to so much under names when nobody has it any more: weights, for the next start of their server"
    text += " (default: nothing)"
    command.add_argument("--keep-weights", type=_size, default=0, metavar="SIZE", help=text)
    text = "when it is told to end while others sleep: hand-over (default): end; they wake from its memory"
    text += " themselves. wait: end when they have woken; a second signal ends it"
    command.add_argument("--at-exit", choices=("hand-over", "wait"), default="hand-over", help=text)
    subcommands = command.add_subparsers(title="commands", metavar="COMMAND")
    status = _add(subcommands, "status", "what it holds, and for whom", "vault status")
    status.add_argument("--socket", type=_path, metavar="PATH", help=socket_text)
    form = status.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--prometheus", action="store_true", help="print metrics as Prometheus reads them")
    forget = _add(subcommands, "forget", "keep no longer what has this name", "vault forget")
    forget.add_argument("name", metavar="NAME", help="as `cumem-sleep vault status` shows it")
    forget.add_argument("--socket", type=_path, metavar="PATH", help=socket_text)


def _add_serve(commands: Any) -> None:
    command = _add(commands, "serve", "several models behind one OpenAI-compatible port")
    command.add_argument("config", nargs="?", type=_path, metavar="models.yaml", help="which models there are")
    command.add_argument("--check", action="store_true", help="only check the file, and whether it will work here")
    command.add_argument("--demo", action="store_true", help="serve simulated models, without a GPU and without a file")
    command.add_argument("--host", metavar="HOST", help="listen here (default: the file's, or 127.0.0.1)")
    command.add_argument("--port", type=_port, metavar="N", help="listen here (default: the file's, or 8000)")


def _add_clients(commands: Any) -> None:
    """Commands that ask a `cumem-sleep serve` that runs."""
    asks = {
        "status": "show the models of a running `cumem-sleep serve`",
        "sleep": "put a model of a running `cumem-sleep serve` to sleep",
        "wake": "wake or start a model of a running `cumem-sleep serve`",
        "stop": "stop a model's server of a running `cumem-sleep serve`",
        "drain": "have a node of several take no new requests",
    }
    url_text = f"the front to ask (default: ${help_texts.URL_VARIABLE}, or {help_texts.DEFAULT_URL})"
    for name, text in asks.items():
        command = _add(commands, name, text)
        command.epilog = help_texts.CLIENT_EPILOG
        if name == "status":
            command.add_argument("--cluster", action="store_true", help="of an ingress over several nodes: each node")
        elif name == "drain":
            command.add_argument("node", metavar="NODE", help="as `status --cluster` has it")
            command.add_argument("--undo", action="store_true", help="have it take requests again")
        else:
            command.add_argument("model", metavar="MODEL", help="its name or alias")
        if name == "sleep":
            command.add_argument("--level", type=int, choices=(1, 2, 3), help="how deep (default: as configured)")
        command.add_argument("--url", help=url_text)
        command.add_argument("--json", action="store_true", help="print JSON")


# Types of arguments


def _size(text: str) -> int:
    try:
        nbytes = int(BYTES.read("size", text))
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


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a port from 0 to 65535")
    return int(text)


def _address(text: str) -> tuple[str, int]:
    """`9400` or `0.0.0.0:9400` or `[::1]:9400`."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if colon else "127.0.0.1"
    if not (host and port.isdecimal() and port.isascii() and int(port) < 1 << 16):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a port from 0 to 65535, such as 9400 or 0.0.0.0:9400")
    return host, int(port)
