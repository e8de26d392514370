"""models.yaml, read and checked: every fault is named with its line, its key, its value and what is allowed."""

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
import yaml

from ..errors import MOST_BYTES
from ..settings import (
    BYTES,
    MOST_SOCKET_BYTES,
    TOKEN,
    SettingKind,
    is_socket,
    one_of,
    parse_list,
    read_plain_file,
    seconds,
    setting,
    whole,
)
from . import hosts
from .address import Address
from .engines import ENGINES, started_by
from .engines.engine import Engine
from .engines.vllm import VllmEngine
from .masking import masked
from .policy import STOP, Spec
from .routing import BUSY

MOST_SHOWN = 100  # letters of a value that is wrong
OF_FRONT = ("CUMEM_SLEEP_IDLE_S", "CUMEM_SLEEP_ON_REQUEST", "CUMEM_SLEEP_DEEP_AFTER_S")  # no server decides for itself
_NOT_SHOWN = ("api_keys", "api_key", "admin_token", "env", "front", "models")  # keys that have secrets in their values
DURATION = seconds(0, 3650 * 86400)
_SHARE = SettingKind((int, float), "a number above 0, and at most 1", lambda share: 0 < share <= 1, float)
_Section = TypeVar("_Section")
Parse = Callable[[object], Any]
_CLOSE = 0.6  # from here on, two names of keys are taken for slips of each other
_IN_NAME = "[A-Za-z0-9._:@+-]"
_ANY_NAME = rf"[A-Za-z0-9]{_IN_NAME}*(/\.*[A-Za-z0-9_:@+-]{_IN_NAME}*)*"  # a path with it is canonical


class ConfigError(ValueError):
    """models.yaml is wrong: file, line, key, value and what is allowed, one fault per line."""


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong, and where."""

    path: tuple[str | int, ...]
    says: str


# Values


def parse_depth(value: object) -> int:
    """A level of sleep, or `stop`.

    Raises:
        ValueError: it is neither.
    """
    if value == "stop":
        return STOP
    if type(value) in (int, str) and str(value) in ("1", "2", "3"):
        return int(str(value))
    raise ValueError("1, 2, 3 or stop")


def _idle(value: object) -> object:
    if value == "never":
        return ()
    if not isinstance(value, Mapping):
        raise ValueError("never, or depths with durations, such as {1: 60s, stop: 2h}")
    steps = sorted((DURATION(after), parse_depth(depth)) for depth, after in value.items())
    if [depth for _, depth in steps] != sorted(depth for _, depth in steps) or len({s for s, _ in steps}) < len(steps):
        raise ValueError("a deeper sleep after a longer time, such as {1: 60s, 3: 10m, stop: 2h}")
    return tuple(steps)


def _levels(value: object) -> object:
    if not isinstance(value, list) or not value:
        raise ValueError("a list of 1, 2, 3 and stop, the preferred one first")
    depths = tuple(parse_depth(each) for each in value)
    if len(set(depths)) < len(depths):
        raise ValueError("each level once")
    return depths


def _health(value: object) -> object:
    if isinstance(value, str) and re.fullmatch(r"/(?!/)[!-~]*", value):  # `//` is for a host
        return value
    raise ValueError("a path, such as /health")


def _any_of(names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def _gpus(value: object) -> object:
    if isinstance(value, str):
        value = [int(word) if re.fullmatch("[0-9]{1,9}", word) else word for word in parse_list(value)]
    numbers = value if isinstance(value, list) else [value]
    if not numbers or not all(type(each) is int and each >= 0 for each in numbers):
        raise ValueError("a list of GPU numbers from 0, such as [0] or [0, 1]")
    if len(set(numbers)) < len(numbers):
        raise ValueError("each GPU once")
    return tuple(sorted(numbers))


def _command(value: object) -> object:
    if isinstance(value, str):
        try:
            value = shlex.split(value)
        except ValueError as error:
            raise ValueError(f"a command with valid shell quoting ({error})") from None
    if not isinstance(value, list | tuple) or not value or not all(isinstance(word, str | int) for word in value):
        raise ValueError("a command, such as vllm serve Qwen/Qwen3-8B, or its words as a list")
    words = tuple(str(word) for word in value)
    if not words[0]:
        raise ValueError("a program and its words")
    return words


def _env(value: object) -> dict[str, str]:
    found = _all_of(value, lambda _name: _text)
    for name in found:
        if name in OF_FRONT:
            raise ValueError(f"no {name}: when its server sleeps and wakes is for this front to choose, by idle")
    return found


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("a string, in quotes if it looks like something else")
    return value


def _path(value: object) -> Path:
    return Path(_text(value))


def _name(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(_ANY_NAME, value):
        raise ValueError("a name of letters, digits and . _ : / @ + -, such as Qwen/Qwen3-8B")
    return value


def _secret(value: object) -> object:
    """The secret itself, `{env: NAME}` or `{file: PATH}`."""
    if isinstance(value, Mapping) and len(value) == 1:
        ((kind, where),) = value.items()
        try:
            if kind == "env":
                value = os.environ[str(where)]
            elif kind == "file":
                value = read_plain_file(Path(str(where)).expanduser()).strip()
        except KeyError:
            raise ValueError(f"a secret that can be read: the environment variable {where} is not set") from None
        except (OSError, ValueError, RuntimeError) as error:  # no such file, not UTF-8, no path, no such user
            raise ValueError(f"a secret that can be read: {type(error).__name__}: {error}") from None
    if not isinstance(value, str) or not TOKEN.allows(value):
        raise ValueError("printable ASCII without spaces, {env: NAME} or {file: PATH}")
    return value


def parse_host(value: object) -> str:
    """A host to listen on. An empty one would be all of the machine's addresses, where nobody may have meant that.

    Raises:
        ValueError: it is empty, or no host.
    """
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9_.:%-]+", value):
        return value
    raise ValueError("a name or an address, such as 127.0.0.1; 0.0.0.0 for all addresses of this machine")


def _url(value: object) -> object:
    if isinstance(value, str) and re.fullmatch(r"https?://[^/?#@\s]+/?|unix:/[^\s]+", value) and value.isprintable():
        with suppress(ValueError, httpx.InvalidURL):  # of a port, a name or an address that is none
            where = urlsplit(value)
            if where.scheme == "unix":
                is_one = is_socket(value.removeprefix("unix:"))
            else:
                is_one = where.port != 0 and bool(httpx.URL(value).host.encode("idna"))
            if is_one:
                return value.rstrip("/")
    raise ValueError(f"http://HOST:PORT, https://HOST:PORT or unix:/PATH of at most {MOST_SOCKET_BYTES} bytes")


# Lists, mappings and sections


class Faulty(ValueError):
    """Several things are wrong with a value, each at its place in it."""

    def __init__(self, faults: list[Fault]) -> None:
        super().__init__()
        self.faults = faults


def _each(values: Iterable[tuple[Any, object]], kind_of: Callable[[Any], Parse]) -> dict[Any, Any]:
    """What each of some values stands for, by its place.

    Raises:
        Faulty.
    """
    found: dict[Any, Any] = {}
    faults: list[Fault] = []
    for place, value in values:
        try:
            found[place] = kind_of(place)(value)
        except Faulty as error:
            faults += [replace(each, path=(place, *each.path)) for each in error.faults]
        except ValueError as error:
            faults.append(Fault((place,), f"expected {error}"))
    if faults:
        raise Faulty(faults)
    return found


def _list_of(kind: Parse) -> Parse:
    def read(value: object) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise ValueError("a list")
        return tuple(_each(enumerate(value), lambda _place: kind).values())

    return read


def _all_of(value: object, kind_of: Callable[[Any], Parse]) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        raise ValueError("keys with values, not a list or a single value")
    return _each(value.items(), kind_of)


def section(cls: type[_Section]) -> Callable[[object], _Section]:
    """What reads the keys of a dataclass. Without a value a key has its default.

    Raises, when it is called:
        ValueError, Faulty.
    """
    kinds: dict[object, Parse] = {each.name: each.metadata["kind"] for each in fields(cls)}  # type: ignore[arg-type]

    def kind_of(key: object) -> Parse:
        if key not in kinds:
            close = difflib.get_close_matches(str(key), map(str, kinds), 1, _CLOSE)
            hint = f"did you mean {close[0]}? " if close else ""
            raise Faulty([Fault((), f"unknown key: {hint}expected one of {', '.join(map(str, kinds))}")])
        return lambda value: None if value is None else kinds[key](value)

    return lambda value: cls(**{key: found for key, found in _all_of(value, kind_of).items() if found is not None})


# The tables


@dataclass(frozen=True)
class ModelConfig:
    """One model: its keys, with what they do."""

    command: tuple[str, ...] | None = setting(
        _command, None, "Starts its server. It is split into words, without other shell syntax."
    )
    engine: str | None = setting(
        one_of(*ENGINES), None, "[What its server is](#engines): `vllm`, `sglang` or `command`.", "by its command"
    )
    health: str | None = setting(
        _health, None, "With `engine: command`: the path that answers 200 when the server is ready.", "`/health`"
    )
    url: str | None = setting(
        _url, None, "Or a running server: `http://HOST:PORT`, `https://HOST:PORT` or `unix:/PATH`."
    )
    api_key: str | None = setting(_secret, None, "The API key that this server requires; also its gate's token.")
    env: Mapping[str, str] = setting(_env, {}, "More environment variables of the server.")
    gpus: tuple[int, ...] = setting(
        _gpus, (0,), "Its GPUs, as `nvidia-smi` or the front's own `CUDA_VISIBLE_DEVICES` count them.", "`[0]`"
    )
    share: float = setting(_SHARE, 1, "How much of each it takes. Models that add up to 1 may be awake together.")
    idle: tuple[tuple[float, int], ...] | None = setting(
        _idle, None, "How deep, 1 to 3 or `stop`, after how long without a request; or `never`.", "`{1: 5m}`, or stop"
    )
    levels: tuple[int, ...] | None = setting(
        _levels,
        None,
        "How deep it may sleep to make room: the first that host memory allows.",
        "`[1, 2, stop]`, or less",
    )
    keep: float = setting(DURATION, 0, "The least time awake before it may be evicted.")
    drain: float = setting(
        DURATION, 60, "How long running requests may take when it is evicted, before they end with an error.", "`60s`"
    )
    wait: float = setting(DURATION, 300, "How long a request waits at most.", "`5m`")
    aliases: tuple[str, ...] = setting(_list_of(_name), (), "Other names of it.")
    host_memory: int | None = setting(
        BYTES, None, "What it needs at level 1. Without the plugin: the memory of its GPUs.", "asked of the server"
    )
    at_start: str = setting(
        one_of("asleep", "awake", "stopped"),
        "asleep",
        "`asleep` or `awake`: started with the front. `stopped`, and `engine: command`: by its first request.",
    )
    copies: int = setting(whole(1, MOST_BYTES), 1, "On how many [nodes](many-hosts.md) it is started with the fronts.")
    start_timeout: float = setting(DURATION, 600, "When a start counts as failed.", "`10m`")
    switch_timeout: float = setting(DURATION, 120, "When a sleep or a wake counts as failed.", "`2m`")

    @property
    def owned(self) -> bool:
        """Its server is started and stopped here."""
        return self.command is not None

    @property
    def kind(self) -> type[Engine]:
        """Its engine. Servers of others, and commands that nobody knows, are taken for vLLM's."""
        return ENGINES[self.engine] if self.engine else started_by(self.command or ()) or VllmEngine

    def connect(self, address: Address, within_s: float) -> Engine:
        """To its server; `within_s`: what a sleep or wake may take."""
        engine = self.kind(address, within_s)
        engine.health = self.health or engine.health
        return engine

    @property
    def idle_steps(self) -> tuple[tuple[float, int], ...]:
        """`idle`; without it, the least sleep after five minutes."""
        return self.idle if self.idle is not None else ((300.0, next(iter(self.kind.LEVELS), STOP)),)

    def spec(self, name: str) -> Spec:
        """For the scheduler. What has no sleep mode is not started to sleep at once."""
        sleeps = self.kind.LEVELS
        levels = (*(level for level in (1, 2) if level in sleeps), *((STOP,) if self.owned else ()))
        return Spec(
            name=name,
            gpus=frozenset(self.gpus),
            share=self.share,
            keep_s=self.keep,
            drain_s=self.drain,
            wait_s=self.wait,
            idle=self.idle_steps,
            levels=self.levels or levels,
            owned=self.owned,
            at_start="stopped" if self.at_start == "asleep" and not sleeps else self.at_start,
            host_bytes=self.host_memory or 0,
            identity=(
                *(self.command, self.engine, self.health, self.url, self.api_key),
                *(tuple(sorted(self.env.items())), self.gpus, self.share),
            ),
        )


@dataclass(frozen=True)
class FrontConfig:
    """The front's own keys."""

    host: str = setting(parse_host, "127.0.0.1", "Where it listens; or `--host`.")
    port: int = setting(whole(0, 65535), 8000, "Its port; or `--port`.")
    allowed_hosts: tuple[str, ...] = setting(
        _list_of(hosts.parse_allowed), (), "[Names](#security) by which clients may ask, without a port; `*` for any."
    )
    api_keys: tuple[str, ...] = setting(_list_of(_secret), (), "The keys of clients. Without any, anyone may ask.")
    admin_token: str | None = setting(_secret, None, "For all that changes state. Without one, that gets 403.")
    max_waiting: int = setting(whole(1, MOST_BYTES), 2000, "How many requests may wait, over all models.")
    max_head: int = setting(BYTES, 64 << 20, "Bytes of a body that may come before its `model`.", "`64MiB`")
    max_held: int = setting(BYTES, 1 << 30, "Bytes of the bodies of all requests that wait.", "`1GiB`")


def _models(value: object) -> dict[str, ModelConfig]:
    return _all_of(value, _model_of)


def _model_of(name: object) -> Parse:
    _name(name)
    return section(ModelConfig)


@dataclass(frozen=True)
class VaultConfig:
    """The keys of the front's own vault."""

    memory: int = setting(BYTES, 0, "Host memory that it takes.", "required")
    spill: Path | None = setting(_path, None, "A private folder for [files](vault.md#files).")
    spill_size: int | None = setting(BYTES, None, "What they may hold; with `spill`.", "none")
    keep_weights: int | None = setting(
        BYTES,
        None,
        "How much of weights it [keeps for the next start](vllm.md#weights-that-a-server-before-has-loaded).",
        "none",
    )


@dataclass(frozen=True)
class Config:
    """All of models.yaml."""

    models: Mapping[str, ModelConfig] = setting(_models, {}, "The models, by name.", "required")
    front: FrontConfig = setting(section(FrontConfig), FrontConfig(), "The keys of the front.", "as below")
    vault: VaultConfig | None = setting(section(VaultConfig), None, "The front's own [vault](#with-the-vault).")
    host_memory: int | None = setting(
        BYTES, None, "What sleepers may hold, beside those [in the vault](#with-the-vault).", "what is free, less 2 GiB"
    )
    logs: Path | None = setting(_path, None, "The folder of servers' logs.", "`~/.local/state/cumem-sleep/serve`")
    hosts: tuple[str, ...] = setting(
        _list_of(parse_host), (), "[Several nodes](many-hosts.md), by their addresses in Ray.", "all that Ray has"
    )
    busy: int = setting(
        whole(1, MOST_BYTES), BUSY, "Over several nodes: how many requests a model has before one more node wakes it."
    )

    def secrets(self) -> set[str]:
        """All keys and tokens in it."""
        found = {self.front.admin_token, *self.front.api_keys, *(model.api_key for model in self.models.values())}
        return {each for each in found if each}

    def names(self) -> dict[str, str]:
        """Each name and alias, with the model's name."""
        own = {name: name for name in self.models}
        return {alias: name for name, model in self.models.items() for alias in model.aliases} | own


KEYS = {"": Config, "front.": FrontConfig, "vault.": VaultConfig, "models.NAME.": ModelConfig}


def load(path: Path) -> Config:
    """Read a file.

    Raises:
        ConfigError: it cannot be read, or something in it is wrong.
    """
    try:
        text = read_plain_file(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    return parse(text, str(path))


def parse(text: str, file: str = "models.yaml") -> Config:
    """The same of a text.

    Raises:
        ConfigError: something in it is wrong.
    """
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        data = {} if root is None else loader.construct_document(root)
    except yaml.MarkedYAMLError as error:
        line, column = (error.problem_mark.line + 1, error.problem_mark.column + 1) if error.problem_mark else (1, 1)
        problem = re.sub(r"'[^'<]{2,}'", "'…'", error.problem or "")  # the name of an alias may be a secret with a *
        raise ConfigError(f"{file}:{line}: not YAML: {problem} at column {column}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: not YAML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{file}: lists and mappings are nested too deeply") from None
    except (ValueError, KeyError, AttributeError):  # of PyYAML's own constructors
        raise ConfigError(f"{file}: not YAML: a value is not what its tag or its form says") from None
    try:
        config = section(Config)(data)
        faults = list(_contradictions(config))
    except Faulty as error:
        faults = error.faults
    except ValueError as error:
        faults = [Fault((), f"expected {error}")]
    if faults:
        raise ConfigError("\n".join(f"{file}:{_says(fault, root)}" for fault in faults))
    return config


# Where things are


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Plain values alone. A key that is there twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The keys of a mapping with their values."""
        seen: dict[str, yaml.Node] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and (first := seen.setdefault(key.value, key)) is not key:
                why = f"a key is there twice, on line {first.start_mark.line + 1} already,"
                raise yaml.constructor.ConstructorError(None, None, why, key.start_mark)
        return dict(super().construct_mapping(node, deep))


def _says(fault: Fault, root: yaml.Node | None) -> str:
    """A fault for people, from its line on. Secrets are not repeated."""
    line, node = 1, root
    for place in fault.path:
        below: list[tuple[yaml.Node, yaml.Node]] = []
        if isinstance(node, yaml.MappingNode):
            below = [(key, value) for key, value in node.value if key.value == str(place)]
        elif isinstance(node, yaml.SequenceNode):
            below = [(node.value[int(place)], node.value[int(place)])]
        key, node = below[-1] if below else (None, None)  # it is not there, or was merged, and then given
        line = key.start_mark.line + 1 if key is not None else line
    is_shown = isinstance(node, yaml.ScalarNode) and not _may_hold_secrets(fault.path)
    text = masked(repr(node.value)) if node is not None and is_shown else ""
    value = f": {text if len(text) <= MOST_SHOWN else f'{text[:MOST_SHOWN]}…'}" if text else ""
    return f"{line}: {_key(fault.path) or 'the file'}{value}: {fault.says}"


def _owner(path: tuple[str | int, ...]) -> tuple[type[Any], int]:
    """Whose keys a path goes through last, and where in the path such a key is."""
    if path[:1] in (("front",), ("vault",)) and len(path) > 1:
        return FrontConfig if path[0] == "front" else VaultConfig, 1
    if path[:1] == ("models",) and len(path) > 2:
        return ModelConfig, 2
    return Config, 0


def _may_hold_secrets(path: tuple[str | int, ...]) -> bool:
    """Whether what a path leads to is not to be repeated: also where a key, its place or its colon has a slip."""
    owner, at = _owner(path)
    return not path or path[at] not in _keys(owner) or path[at] in _NOT_SHOWN


def _key(path: tuple[str | int, ...]) -> str:
    """A key for people, up to where a value may follow it in the same word. Names of models have more in them."""
    words = [str(each) for each in path]
    is_model = words[:1] == ["models"]
    return ".".join(
        masked(word) if is_model and number == 1 else re.sub(r"[=:\s].*", "…", word, flags=re.DOTALL)
        for number, word in enumerate(words)
    )


def _keys(owner: type[Any]) -> list[str]:
    return [each.name for each in fields(owner)]


def _contradictions(config: Config) -> Iterator[Fault]:
    """What is wrong although each value is allowed."""
    if not config.models:
        yield Fault(("models",), "expected at least one")
    if config.vault is not None and not config.vault.memory:
        yield Fault(("vault", "memory"), "expected how much host memory it takes, such as 200GiB")
    if config.vault is not None and (config.vault.spill is None) != (config.vault.spill_size is None):
        yield Fault(("vault",), "expected both spill and spill_size, or neither")
    admin_token, keys = config.front.admin_token, (model.api_key for model in config.models.values())
    if admin_token is not None and admin_token in (*config.front.api_keys, *keys):
        yield Fault(("front", "admin_token"), "is an API key, too: expected a token that only operators have")
    taken = {name: name for name in config.models}
    for name, model in config.models.items():
        path = ("models", name)
        if (model.command is None) == (model.url is None):
            yield Fault(path, "expected either command or url" + (", not both" if model.command else ""))
        for number, alias in enumerate(model.aliases):
            if alias in taken:
                other = "its own name or alias" if taken[alias] == name else f"the model {taken[alias]}"
                yield Fault((*path, "aliases", number), f"is taken by {other}")
            taken.setdefault(alias, name)
        yield from _not_of_engine(path, model)
        if model.owned:
            for wrong in model.kind.wrong_places(model.command or ()):
                yield Fault((*path, "command"), wrong)
            continue
        for key, depths in _depths(model):
            if STOP in depths:
                yield Fault((*path, key), "a server by url cannot be stopped from here: expected 1, 2 or 3")
        if model.env:
            yield Fault((*path, "env"), "is only for servers with a command")


def _not_of_engine(path: tuple[str | int, ...], model: ModelConfig) -> Iterator[Fault]:
    """What a model's engine does not have."""
    engine = model.kind
    if not model.owned and not engine.BY_URL:
        yield Fault((*path, "url"), f"{engine.NAME} cannot be asked whether it sleeps: expected a command")
    if model.health is not None and engine.LEVELS:
        yield Fault((*path, "health"), "is only for engine: command")
    has = _any_of([*map(str, engine.LEVELS), "stop"])
    for key, depths in _depths(model):
        if any(depth != STOP and depth not in engine.LEVELS for depth in depths):
            yield Fault((*path, key), f"{engine.NAME} has no such level: expected {has}")


def _depths(model: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Those that it may sleep at, by the key that says so."""
    yield "idle", tuple(depth for _, depth in model.idle or ())
    yield "levels", model.levels or ()
