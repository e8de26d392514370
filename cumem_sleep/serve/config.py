"""models.yaml, read and checked: every fault is named with its line, its key, its value and what is allowed."""

from __future__ import annotations

import difflib
import errno
import math
import os
import re
import shlex
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import httpx
import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from ..errors import InvalidArgument
from ..settings import parse_bytes
from . import hosts
from .address import Address
from .engines import ENGINES, started_by
from .engines.engine import Engine
from .engines.vllm import VllmEngine
from .masking import masked
from .policy import STOP, Spec

ALLOWED_DURATION = "seconds, or a number with ms, s, m, h or d, such as 500ms, 60s or 1h30m"
ALLOWED_SIZE = "bytes, or a number with KiB, MiB, GiB, TiB, KB, MB, GB or TB, such as 200GiB"
_DURATION = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
MOST_S = 3650 * 86400.0
MOST_BYTES = 1 << 60
MOST_FILE_BYTES = 1 << 20
MOST_NODES = 100_000  # lists, mappings and values; a file of a few lines can name more, by aliases of aliases
MOST_BITS = 64  # of a whole number: Python prints none of many thousands
_YAML_TAG = "tag:yaml.org,2002:"
MOST_SHOWN = 100  # letters of a value that is wrong
MOST_HEALTH_LETTERS = 2000
MOST_SOCKET_BYTES = 107  # of its path: unix(7)
OF_FRONT = ("CUMEM_SLEEP_IDLE_S", "CUMEM_SLEEP_ON_REQUEST", "CUMEM_SLEEP_DEEP_AFTER_S")  # no server decides for itself
_NOT_SHOWN = ("api_keys", "api_key", "admin_token", "env", "front", "models")  # keys that have secrets in their values
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


# Values with units


def parse_duration(value: object) -> float:
    """`"1h30m"`, `"500ms"` or 60 in seconds.

    Raises:
        ValueError: not a duration.
    """
    seconds = -1.0
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(min(value, MOST_S + 1))
    elif isinstance(value, str) and re.fullmatch(r"(\d+(\.\d+)?\s*(ms|s|m|h|d)\s*)+", value.strip()):
        parts = re.findall(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)", value)
        seconds = sum(float(number) * _DURATION[unit] for number, unit in parts)
    if 0 <= seconds <= MOST_S:
        return seconds
    raise ValueError(f"{ALLOWED_DURATION}, and at most 3650d")


def parse_size(value: object) -> int:
    """`"200GiB"` or 1073741824 in bytes, as `CUMEM_SLEEP_…` has them.

    Raises:
        ValueError: not a size.
    """
    with suppress(InvalidArgument):
        nbytes = parse_bytes("size", value) if isinstance(value, str) else value
        if isinstance(nbytes, int) and not isinstance(nbytes, bool) and 0 <= nbytes <= MOST_BYTES:
            return nbytes
    raise ValueError(ALLOWED_SIZE)


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
    steps = sorted((parse_duration(after), parse_depth(depth)) for depth, after in value.items())
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


def _engine(value: object) -> object:
    if isinstance(value, str) and value in ENGINES:
        return value
    raise ValueError(_any_of(ENGINES))


def _health(value: object) -> object:
    if isinstance(value, str) and re.fullmatch(rf"/(?!/)[!-~]{{0,{MOST_HEALTH_LETTERS}}}", value):  # `//` is for a host
        return value
    raise ValueError("a path, such as /health")


def _any_of(names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def _gpus(value: object) -> object:
    numbers = value if isinstance(value, list) else [value]
    if not numbers or not all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in numbers):
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
    if not words[0] or not all(map(_can_be_passed, words)):
        raise ValueError("a program and its words, without NUL and halves of letters")
    return words


def _env(value: dict[str, str]) -> dict[str, str]:
    for name, text in value.items():
        if name in OF_FRONT:
            raise ValueError(f"no {name}: when its server sleeps and wakes is for this front to choose, by idle")
        if not name or "=" in name or not _can_be_passed(name + text):
            shown = repr(_cut(name.partition("=")[0]))
            raise ValueError(f"names without = and values, all without NUL and halves of letters: not {shown}")
    return value


def _logs(value: Path) -> Path:
    if not _can_be_passed(str(value)):
        raise ValueError("a path without NUL and halves of letters")
    return value


def _can_be_passed(text: str) -> bool:
    """Whether the system takes a text as an argument, a variable or a path."""
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:
        return False


def _secret(value: object) -> object:
    """The secret itself, `{env: NAME}` or `{file: PATH}`."""
    if isinstance(value, Mapping) and len(value) == 1:
        ((kind, where),) = value.items()
        try:
            if kind == "env":
                value = os.environ[str(where)]
            elif kind == "file":
                value = _text_of(Path(str(where)).expanduser()).strip()
        except KeyError:
            raise ValueError(f"a secret that can be read: the environment variable {where} is not set") from None
        except (OSError, ValueError, RuntimeError) as error:  # no such file, not UTF-8, no path, no such user
            raise ValueError(f"a secret that can be read: {type(error).__name__}: {error}") from None
    if not isinstance(value, str) or not value:
        raise ValueError("a non-empty string, {env: NAME} or {file: PATH}")
    if not value.isascii() or not value.isprintable() or " " in value:
        raise ValueError("printable ASCII characters without spaces")
    return value


def parse_host(value: object) -> str:
    """A host to listen on. An empty one would be all of the machine's addresses, where nobody may have meant that.

    Raises:
        ValueError: it is empty, or no host.
    """
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9_.:%-]+", value):
        return value
    raise ValueError("a name or an address, such as 127.0.0.1; 0.0.0.0 for all addresses of this machine")


def _text_of(path: Path) -> str:
    """What a file says, read without waiting for anybody to write it: this is done while requests are served.

    Raises:
        OSError: it cannot be read, is no plain file, or too long.
        UnicodeDecodeError: it is not UTF-8.
    """
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "expected a plain file, not a pipe or a device", str(path))
        content = file.read(MOST_FILE_BYTES + 1) or b""
    if len(content) > MOST_FILE_BYTES:
        raise OSError(errno.EFBIG, f"expected at most {MOST_FILE_BYTES} bytes", str(path))
    return content.decode()


def _url(value: object) -> object:
    if isinstance(value, str) and re.fullmatch(r"https?://[^/?#@\s]+/?|unix:/[^\s]+", value) and value.isprintable():
        with suppress(ValueError, httpx.InvalidURL):  # of a port, a name or an address that is none
            where = urlsplit(value)
            if where.scheme == "unix":
                is_one = len(value.removeprefix("unix:").encode()) <= MOST_SOCKET_BYTES
            else:
                is_one = where.port != 0 and bool(httpx.URL(value).host.encode("idna"))
            if is_one:
                return value.rstrip("/")
    raise ValueError(f"http://HOST:PORT, https://HOST:PORT or unix:/PATH of at most {MOST_SOCKET_BYTES} bytes")


HostName = Annotated[str, BeforeValidator(parse_host)]
Duration = Annotated[float, BeforeValidator(parse_duration)]
Size = Annotated[int, BeforeValidator(parse_size)]
Secret = Annotated[str, BeforeValidator(_secret)]
AllowedHost = Annotated[str, BeforeValidator(hosts.parse_allowed)]
Name = Annotated[str, Field(pattern=f"^{_ANY_NAME}$")]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, hide_input_in_errors=True)


class ModelConfig(_Strict):
    """One model. `docs/several-models.md` has every key.

    Attributes:
        command: what starts its server; the arguments that this front needs are added.
        engine: what its server is, where its command does not say so.
        health: a path that a server without sleep mode answers with success when it is ready.
        url: a server that somebody else started, instead of a command.
        api_key: that the server itself wants.
        env: more environment variables of the server.
        gpus: that it uses while awake.
        share: of the memory of each; with less than 1 others may be awake beside it.
        idle: seconds without a request, and the depth that it then sleeps at.
        levels: the depths that it may sleep at when others need its GPUs, the preferred one first.
        keep: seconds after a wake in which others do not push it out.
        drain: seconds that running requests have to end when it is pushed out.
        wait: seconds that a request waits for it at most.
        host_memory: bytes that its backups take at level 1; asked of the server, or estimated, without it.
        at_start: whether it is started with the front, and stays awake then.
        start_timeout, switch_timeout: seconds after which a start, or a sleep or wake, has failed.
    """

    command: Annotated[tuple[str, ...] | None, BeforeValidator(_command)] = None
    engine: Annotated[str | None, BeforeValidator(_engine)] = None
    health: Annotated[str | None, BeforeValidator(_health)] = None
    url: Annotated[str | None, BeforeValidator(_url)] = None
    api_key: Secret | None = None
    env: Annotated[dict[str, str], AfterValidator(_env)] = {}
    gpus: Annotated[tuple[int, ...], BeforeValidator(_gpus)] = (0,)
    share: Annotated[float, Field(gt=0, le=1, strict=False)] = 1.0
    idle: Annotated[tuple[tuple[float, int], ...] | None, BeforeValidator(_idle)] = None
    levels: Annotated[tuple[int, ...] | None, BeforeValidator(_levels)] = None
    keep: Duration = 0.0
    drain: Duration = 60.0
    wait: Duration = 300.0
    aliases: list[Name] = []
    host_memory: Size | None = None
    at_start: Literal["awake", "asleep", "stopped"] = "asleep"
    start_timeout: Duration = 600.0
    switch_timeout: Duration = 120.0

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


class FrontConfig(_Strict):
    """The front's own settings.

    Attributes:
        host, port: where it listens.
        allowed_hosts: by which names it may be asked, beside `host`, those of the loopback interface, and the address
            that a client reached; `*` for any. With `api_keys` any, unless some are set.
        api_keys: of clients; without any, everybody may ask.
        admin_token: for everything that changes state; without one, admin paths answer 403 always.
        max_waiting: requests that may wait at a time, over all models.
        max_head_bytes: of a body, in which its `model` has to come (`max_head`).
        max_held_bytes: of the bodies of all requests that wait (`max_held`).
    """

    model_config = ConfigDict(populate_by_name=True)
    host: HostName = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    allowed_hosts: list[AllowedHost] = []
    api_keys: list[Secret] = []
    admin_token: Secret | None = None
    max_waiting: Annotated[int, Field(ge=1)] = 2000
    max_head_bytes: Annotated[Size, Field(alias="max_head")] = 64 << 20
    max_held_bytes: Annotated[Size, Field(alias="max_held")] = 1 << 30


class Config(_Strict):
    """Everything.

    Attributes:
        host_memory: what sleepers may hold, those in the vault aside; without it, what the system says that it has.
        logs: folder of the servers' logs.
    """

    front: FrontConfig = FrontConfig()
    host_memory: Size | None = None
    logs: Annotated[Annotated[Path, AfterValidator(_logs)] | None, Field(strict=False)] = None
    models: Annotated[dict[Name, ModelConfig], Field(min_length=1)]

    def secrets(self) -> set[str]:
        """All keys and tokens in it."""
        found = {self.front.admin_token, *self.front.api_keys, *(model.api_key for model in self.models.values())}
        return {each for each in found if each}

    def names(self) -> dict[str, str]:
        """Each name and alias, with the model's name."""
        own = {name: name for name in self.models}
        return {alias: name for name, model in self.models.items() for alias in model.aliases} | own


def load(path: Path) -> Config:
    """Read a file.

    Raises:
        ConfigError: it cannot be read, or something in it is wrong.
    """
    try:
        text = _text_of(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    return parse(text, str(path))


def parse(text: str, file: str = "models.yaml") -> Config:
    """The same of a text.

    Raises:
        ConfigError: something in it is wrong.
    """
    document = _Document(file)
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        document.data = data = {} if root is None else document.value(root, ())
    except yaml.YAMLError as error:
        raise ConfigError(_yaml_fault(file, error)) from None
    except RecursionError:
        raise ConfigError(f"{file}: lists and mappings are nested too deeply") from None
    faults = document.faults
    if not faults:
        try:
            config = Config.model_validate(data)
            faults = list(_contradictions(config))
        except ValidationError as error:
            faults = [_fault(each) for each in error.errors(include_url=False)]
    if faults:
        raise ConfigError("\n".join(document.says(fault) for fault in faults))
    return config


# Where things are


class _Document:
    """A YAML document, with the line of everything.

    Attributes:
        data: what it says, as plain data; None until it was read.
        faults: that were found while it was read.
    """

    def __init__(self, file: str) -> None:
        self._file = file
        self._lines: dict[tuple[str | int, ...], int] = {(): 1}
        self._texts: dict[tuple[str | int, ...], str] = {}
        self._nodes = 0
        self.data: object = None
        self.faults: list[Fault] = []

    def value(self, node: yaml.Node, path: tuple[str | int, ...]) -> object:
        """What a node says."""
        self._lines.setdefault(path, node.start_mark.line + 1)
        self._nodes += 1
        if self._nodes > MOST_NODES:
            raise ConfigError(f"{self._file}: aliases and merge keys make more than {MOST_NODES} values of it")
        if isinstance(node, yaml.ScalarNode):
            self._texts[path] = node.value
            return self._scalar(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(each, (*path, number)) for number, each in enumerate(node.value)]
        return self._mapping(node, path)

    def _scalar(self, node: yaml.ScalarNode, path: tuple[str | int, ...]) -> object:
        try:
            found: object = yaml.SafeLoader("").construct_object(node)
        except (yaml.YAMLError, ValueError, KeyError, AttributeError):  # as its tag or its form says what it is not
            what = node.tag if node.tag.startswith(_YAML_TAG) else "a tag of its own"  # which may be a secret with a !
            self.faults.append(Fault(path, f"expected a plain value, and not one that YAML takes for {what}"))
            return None
        if isinstance(found, int) and found.bit_length() > MOST_BITS:
            self.faults.append(Fault(path, f"expected a number of at most {MOST_BITS} bits"))
            return None
        return found

    def says(self, fault: Fault) -> str:
        """A fault for people. Secrets are not repeated."""
        path = fault.path
        while path not in self._lines:
            path = path[:-1]
        key = _key(fault.path) or "the file"
        text = self._texts.get(fault.path)
        shown = "" if _may_hold_secrets(fault.path) else repr(text) if text is not None else self._in_short(fault.path)
        value = f": {_cut(masked(shown))}" if shown else ""
        return f"{self._file}:{self._lines[path]}: {key}{value}: {fault.says}"

    def _in_short(self, path: tuple[str | int, ...]) -> str:
        """The list or mapping that a key has, on one line; "" if it has keys of its own."""
        found = self.data
        for each in path:
            try:
                found = found[each]  # type: ignore[index]
            except (KeyError, IndexError, TypeError):
                return ""
        if not _has_no_keys(found):
            return ""
        text = yaml.safe_dump(found, default_flow_style=True, sort_keys=False, allow_unicode=True, width=math.inf)
        return str(text).strip()

    def _mapping(self, node: yaml.Node, path: tuple[str | int, ...]) -> dict[object, object]:
        found: dict[object, object] = {}
        written = Counter(str(key_node.value) for key_node, _ in node.value if isinstance(key_node, yaml.ScalarNode))
        for key_node, value_node in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                merged = value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
                for each in merged:
                    values = self.value(each, path)
                    if isinstance(values, dict):
                        found = {**values, **found}
                    else:
                        self.faults.append(Fault(path, "<<: expected an alias of keys with values, such as *common"))
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                self.faults.append(Fault(path, f"a key on line {key_node.start_mark.line + 1} is not a single word"))
                continue
            key = self._scalar(key_node, path)
            inner = (*path, key if isinstance(key, int) else str(key))
            line = key_node.start_mark.line + 1
            if inner in self._lines and key in found and written[key_node.value] > 1:  # and not merged
                self._lines[inner], first = line, self._lines[inner]
                self.faults.append(Fault(inner, f"is there twice, on line {first} already"))
            self._lines[inner] = line
            found[key] = self.value(value_node, inner)
        return found


def _cut(text: str) -> str:
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"


def _yaml_fault(file: str, error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        problem = re.sub(r"'[^'<]{2,}'", "'…'", error.problem or "")  # the name of an alias may be a secret with a *
        return f"{file}:{mark.line + 1}: not YAML: {problem} at column {mark.column + 1}"
    return f"{file}: not YAML: {error}"


_NO_KEYS = "expected keys with values, not a list or a single value"
# What pydantic finds, in our words; {} is for what it says of the limit.
_WORDS = {
    "too_short": "expected at least one",
    "missing": "is missing",
    "string_pattern_mismatch": "expected a name of letters, digits and . _ : / @ + -, such as Qwen/Qwen3-8B",
    "dict_type": _NO_KEYS,
    "model_type": _NO_KEYS,
    "list_type": "expected a list",
    "string_type": "expected a string, in quotes if it looks like something else",
    "int_type": "expected a whole number",
    "float_type": "expected a number",
    "float_parsing": "expected a number",
    "path_type": "expected a path",
    "greater_than": "expected more than {gt:g}",
    "greater_than_equal": "expected at least {ge:g}",
    "less_than_equal": "expected at most {le:g}",
}


def _fault(error: Any) -> Fault:
    """What pydantic found, in our words."""
    kind, path = error["type"], tuple(each for each in error["loc"] if each != "[key]")
    limits = error.get("ctx", {})
    if kind == "extra_forbidden":
        return Fault(path, _unknown_key(path))
    if kind == "literal_error":
        return Fault(path, f"expected {limits['expected'].replace(chr(39), '')}")
    if kind == "value_error":
        return Fault(path, f"expected {limits['error']}")
    return Fault(path, _WORDS[kind].format_map(limits) if kind in _WORDS else error["msg"])


def _unknown_key(path: tuple[str | int, ...]) -> str:
    known = _keys(_owner(path)[0])
    close = difflib.get_close_matches(str(path[-1]), known, 1, _CLOSE)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"unknown key: {hint}expected one of {', '.join(known)}"


def _owner(path: tuple[str | int, ...]) -> tuple[type[BaseModel], int]:
    """Whose keys a path goes through last, and where in the path such a key is."""
    if path[:1] == ("front",) and len(path) > 1:
        return FrontConfig, 1
    if path[:1] == ("models",) and len(path) > 2:
        return ModelConfig, 2
    return Config, 0


def _may_hold_secrets(path: tuple[str | int, ...]) -> bool:
    """Whether what a path leads to is not to be repeated: also where a key, its place or its colon has a slip."""
    owner, at = _owner(path)
    return not path or path[at] not in _keys(owner) or path[at] in _NOT_SHOWN


def _has_no_keys(value: object) -> bool:
    """Whether no words are keys in it, which may be slips, but for those of `idle`."""
    if isinstance(value, dict):
        return all(type(key) is int or key == "stop" for key in value) and all(map(_has_no_keys, value.values()))
    return not isinstance(value, list) or all(map(_has_no_keys, value))


def _key(path: tuple[str | int, ...]) -> str:
    """A key for people, up to where a value may follow it in the same word. Names of models have more in them."""
    words = [str(each) for each in path]
    is_model = words[:1] == ["models"]
    return ".".join(
        masked(word) if is_model and number == 1 else re.sub(r"[=:\s].*", "…", word, flags=re.DOTALL)
        for number, word in enumerate(words)
    )


def _keys(owner: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in owner.model_fields.items()]


def _contradictions(config: Config) -> Iterator[Fault]:
    """What is wrong although each value is allowed."""
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
