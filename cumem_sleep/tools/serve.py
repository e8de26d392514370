"""The commands `cumem-sleep serve`, and `status`, `sleep`, `wake`, `stop` and `drain`, which ask one that runs."""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlsplit

from rich.table import Table

from ..errors import CumemSleepError, InvalidArgument, InvalidState, counted, format_bytes
from ..settings import TOKEN, token_of
from ..vault import protocol
from ..vault.client import VaultClient
from . import vault
from .console import one_line, say
from .help_texts import DEFAULT_URL, TOKEN_VARIABLE, URL_VARIABLE
from .vault import notify_systemd

if TYPE_CHECKING:
    from ..serve.config import Config
    from ..serve.status import VaultStatus

_OF_VAULTS = ("memory", "pinned", "touched", "asleep", "left", "spilled", "files_free", "files_read")
_LOOK_WITHIN_S = 30.0
_ASK_WITHIN_S = 1800.0  # a model that is to be woken may have to be started
_MOST_ANSWER_BYTES = 64 << 20
_NO_FRONT = "what answers there is no `cumem-sleep serve`"


class FrontUnavailable(CumemSleepError):
    """The front cannot be asked, or refuses; the message says why."""


def serve(options: argparse.Namespace, say: Callable[[str], None]) -> None:
    """Run the front until a signal ends it.

    Raises:
        InvalidArgument: no file, a file that is wrong, or packages that are missing.
    """
    if options.demo == (options.config is not None):
        raise InvalidArgument("expected either a file, as in `cumem-sleep serve models.yaml`, or --demo")
    try:
        from ..serve import config as files
        from ..serve import demo, main
        from ..serve.lock import AlreadyServed, Lock
    except ImportError as error:
        raise _not_installed(error) from None
    to_stderr = logging.StreamHandler(sys.stderr)
    to_stderr.setFormatter(LogFormatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[to_stderr])
    logging.getLogger("cumem_sleep.serve").setLevel(logging.INFO)
    with ExitStack() as ends:
        lock = None
        if options.demo:
            folder = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="cumem-sleep-demo-")))
            config = _with_options(demo.config(folder), options)
        else:
            config = _with_options(read(options.config), options)
            try:
                lock = Lock(options.config)
            except AlreadyServed as error:
                raise InvalidArgument(str(error)) from None
            ends.callback(lock.close)

        def started(port: int) -> None:
            models = f"{counted(len(config.models), 'model')}: {', '.join(config.models)}"
            host = f"[{config.front.host}]" if ":" in config.front.host else config.front.host
            say(f"listens at http://{host}:{port}; {models}")
            for line in demo.invitation(port, config.front.admin_token or "") if options.demo else ():
                say(line)
            notify_systemd("READY=1")

        def load(path: Path) -> Config:
            return _with_options(files.load(path), options)

        _run(main.serve(config, options.config, load, say, started, look_at_vaults, read_ahead, options.demo, lock))


class LogFormatter(logging.Formatter):
    """A record has one line, and its traceback indented ones, whatever servers and clients have said."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """The record's line."""
        return one_line(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        """The lines below it."""
        return "\n".join(f"  {one_line(line)}" for line in super().formatException(ei).split("\n"))


def read_ahead(path: str, pids: Collection[int]) -> None:
    """Have the vault at this socket (`auto`: the user's own) read what these processes have in files, if it answers."""
    with suppress(CumemSleepError), closing(VaultClient(_socket(path), "serve")) as client:
        client.read_ahead(list(pids))


def look_at_vaults(sockets: Collection[str]) -> VaultStatus | None:
    """Those that answer at these sockets (`auto`: this user's own), as if they were one; None if none does."""
    from ..serve.status import VaultStatus

    found = []
    for path in set(map(_socket, sockets)):
        with suppress(CumemSleepError):
            found.append(vault.look(path).facts)
    if not found:
        return None
    total = {name: sum(facts[f"{name}_bytes"] for facts in found) for name in _OF_VAULTS}
    to_come = total["memory"] - total["pinned"] - total["touched"]
    left = total["left"] + total["files_free"]
    spilled = {each["pid"]: each["spilled_bytes"] for facts in found for each in facts["clients"] if each["pid"]}
    read_s = sum(facts["files_read_bytes"] / facts["files_read_gbps"] for facts in found if facts["files_read_gbps"])
    gbps = total["files_read"] / read_s if read_s else None
    by_pid = {pid: nbytes for pid, nbytes in spilled.items() if nbytes}
    return VaultStatus(total["memory"], max(0, to_come), total["asleep"], left, total["spilled"], gbps, by_pid)


def _socket(vault: str) -> Path:
    return protocol.default_socket() if vault == "auto" else Path(vault)


def read(path: Path) -> Config:
    """The configuration in a file.

    Raises:
        InvalidArgument: it is wrong, or packages are missing.
    """
    try:
        from ..serve.config import ConfigError, load
    except ImportError as error:
        raise _not_installed(error) from None
    try:
        return load(path)
    except ConfigError as error:
        *others, last = str(error).splitlines()
        for fault in others:  # a line each
            say(f"cumem-sleep: {fault}", style="bold red")
        raise InvalidArgument(last) from None


def _not_installed(error: ImportError) -> InvalidArgument:
    return InvalidArgument(
        f"`serve` needs more packages ({error.name} is not installed); in a checkout: pip install '.[serve]'"
    )


def check(options: argparse.Namespace) -> tuple[Table, list[str], list[str]]:
    """What a file says, model by model, what that comes to here, and what will not work here.

    Raises:
        InvalidArgument: it is wrong, or packages are missing.
    """
    if options.config is None:
        raise InvalidArgument("--check needs a file, as in `cumem-sleep serve models.yaml --check`")
    config = _with_options(read(options.config), options)
    from ..serve.check import kept, problems
    from ..serve.masking import masked

    table = _table("model", "GPUs", "share", "idle", "keep", "aliases", "server")
    for name, model in config.models.items():
        idle = ", ".join(f"{_depth(depth)} after {after_s:g} s" for after_s, depth in model.idle_steps) or "never"
        gpus = ", ".join(str(gpu) for gpu in model.gpus)
        server = model.url or masked(" ".join(model.command or ()))
        _add_row(table, name, gpus, f"{model.share:g}", idle, f"{model.keep:g} s", ", ".join(model.aliases), server)
    return table, list(kept(config)), [f"{options.config}: {problem}" for problem in problems(config)]


def _with_options(config: Config, options: argparse.Namespace) -> Config:
    from ..serve.config import parse_host

    given = {name: getattr(options, name) for name in ("host", "port") if getattr(options, name) is not None}
    if "host" in given:
        try:
            parse_host(given["host"])
        except ValueError as error:
            raise InvalidArgument(f"--host {given['host']!r}: expected {error}") from None
    return replace(config, front=replace(config.front, **given))


def _run(work: Any) -> None:
    """With uvloop where it is installed: streams cost less."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(work)
    else:
        uvloop.run(work)


# Asking one that runs


def ask(options: argparse.Namespace) -> dict[str, Any]:
    """What the front answers to a command: its status, or the model that was changed.

    Raises:
        FrontUnavailable: nobody answers there, or not as was wanted.
    """
    url = _url(options)
    if options.command == "status":
        return _request(url, "GET", "/status", None)
    if options.command == "drain":
        return _request(url, "POST", "/admin/drain", {"node": options.node, "on": not options.undo})
    call = {"model": options.model}
    if getattr(options, "level", None) is not None:
        call["level"] = options.level
    return {"model": _request(url, "POST", f"/admin/{options.command}", call)}


def _url(options: argparse.Namespace) -> str:
    return str(options.url or os.environ.get(URL_VARIABLE) or DEFAULT_URL)


def _request(url: str, method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
    try:
        where = urlsplit(url)
        port = where.port
    except ValueError:  # an address or a port that is none
        where, port = SplitResult("", "", "", "", ""), None
    if where.scheme not in ("http", "https") or not where.hostname:
        raise InvalidArgument(f"{url!r}: expected a URL such as {DEFAULT_URL}")
    kind = http.client.HTTPSConnection if where.scheme == "https" else http.client.HTTPConnection
    token = token_of(TOKEN_VARIABLE, os.environ)
    if token:
        TOKEN.read(TOKEN_VARIABLE, token)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        connection = kind(where.hostname, port, timeout=_LOOK_WITHIN_S if body is None else _ASK_WITHIN_S)
        try:
            content = None if body is None else json.dumps(body)
            connection.request(method, where.path.rstrip("/") + path, content, headers)
            answer = connection.getresponse()
            found = json.loads(answer.read(_MOST_ANSWER_BYTES))
        finally:
            connection.close()
    except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
        raise FrontUnavailable(f"no `cumem-sleep serve` answers at {url}: {type(error).__name__}: {error}") from error
    if answer.status != http.HTTPStatus.OK:
        hint = f" (${TOKEN_VARIABLE})" if answer.status == http.HTTPStatus.UNAUTHORIZED else ""
        try:
            why = str(found["error"]["message"])
        except (KeyError, TypeError):
            what = f"what answers there, with {answer.status}, is no `cumem-sleep serve`"
            raise FrontUnavailable(f"{url}: {what}") from None
        raise InvalidState(f"{url}: {why}{hint}")
    if not isinstance(found, dict) or not found.keys() & {"models", "name"}:
        raise FrontUnavailable(f"{url}: {_NO_FRONT}")
    return found


def tables(options: argparse.Namespace, found: Mapping[str, Any]) -> list[Table]:
    """What `ask` found, for people.

    Raises:
        FrontUnavailable: it is not what a front says.
    """
    try:
        if options.command not in ("status", "drain"):
            return [models_table([found["model"]])]
        return cluster_tables(found) if getattr(options, "cluster", False) else status_tables(found)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise FrontUnavailable(f"{_url(options)}: {_NO_FRONT}, or one of another version") from None


def models_table(models: list[dict[str, Any]]) -> Table:
    """Models, one a line."""
    table = _table("model", "GPUs", "state", "running", "waiting", "last switch", "host", "trouble")
    for model in models:
        last = model["last_switch"]
        switch = f"{last['kind']} {last['seconds']:.3f} s" if last else ""
        state = model["phase"] + (f" (level {model['level']})" if model["level"] else "")
        gpus, host = ", ".join(str(gpu) for gpu in model["gpus"]), format_bytes(model["host_bytes"])
        host += f" + {format_bytes(kept)} kept" if (kept := model.get("kept_bytes")) else ""
        if in_files := model.get("files_bytes"):
            host += f", {format_bytes(in_files)} in files"
            host += f" (read in {model['files_s']:.1f} s)" if model["files_s"] is not None else ""
        numbers = (str(model["running"]), str(model["waiting"]))
        trouble = "; ".join(filter(None, (model["error"], model.get("last_words"))))
        trouble = trouble or ("without cumem-sleep in it" if model["layer"] == "" else "")
        _add_row(table, model["name"], gpus, state, *numbers, switch, host, trouble)
    return table


def status_tables(status: Mapping[str, Any]) -> list[Table]:
    """GPUs, then models."""
    gpus = _table("GPU", "memory in use", "held by")
    for gpu in status["gpus"]:
        known = gpu["total_bytes"] is not None
        memory = f"{format_bytes(gpu['used_bytes'])} of {format_bytes(gpu['total_bytes'])}" if known else "unknown"
        holders = ", ".join(f"{each['model']} ({each['share']:.0%})" for each in gpu["holders"])
        _add_row(gpus, str(gpu["gpu"]), memory, holders or "nobody")
    return [gpus, models_table(status["models"])]


def cluster_tables(status: Mapping[str, Any]) -> list[Table]:
    """Nodes, then the models of each."""
    nodes, models = _table("node", "state", "awake", "running", "waiting", "version"), []
    for node in status["nodes"]:
        of = node["status"] or {"models": [], "version": "", "draining": False}
        state = "does not answer" if not node["status"] else "draining" if of["draining"] else "up"
        awake = ", ".join(model["name"] for model in of["models"] if model["phase"] == "awake")
        numbers = [str(sum(model[each] for model in of["models"])) for each in ("running", "waiting")]
        _add_row(nodes, node["name"], state, awake, *numbers, of["version"])
        models += [{**model, "name": f"{node['name']}: {model['name']}"} for model in of["models"]]
    return [nodes, models_table(models)]


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column)
    return table


def _add_row(table: Table, *cells: str) -> None:
    table.add_row(*map(one_line, cells))


def _depth(depth: int) -> str:
    from ..serve.policy import STOP

    return "stop" if depth == STOP else f"level {depth}"
