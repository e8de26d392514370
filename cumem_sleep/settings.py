"""Every setting: one table.

A field of `Settings` or `GateSettings` is the environment variable `CUMEM_SLEEP_<FIELD>`; what else is read from the
environment follows below them. `--help`, the doctor and the page of the docs are made from these rows.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from .errors import MOST_BYTES, InvalidArgument, InvalidArgumentType, shown

PREFIX = "CUMEM_SLEEP_"
MOST_FILE_BYTES = 1 << 20  # of models.yaml, or of a file with a token

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS[f"{_letter}IB"] = 1024**_power
    _UNITS[f"{_letter}B"] = 1000**_power
_FLAGS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DAY_S = 24 * 3600
MOST_SOCKET_BYTES = 107  # of its path: unix(7)


class Reader(Enum):
    """Who reads a variable; the value is how the page's sections are called."""

    LAYER = "The layer"
    GATE = "The gate"
    PLUGIN = "The plugin"
    COMMANDS = "Commands that ask a front"
    SIMULATOR = "The simulated driver"


@dataclass(frozen=True)
class Variable:
    """A row of the table.

    Attributes:
        default: as the page writes it, in Markdown.
        text: what it does, in Markdown.
    """

    name: str
    reader: Reader
    default: str
    text: str


def parse_list(text: str) -> list[str]:
    """The words of a list with commas, as `CUDA_VISIBLE_DEVICES` is written: of `0,1` they are `0` and `1`."""
    return [word.strip() for word in text.split(",")]


# Kinds of values: of a field, and of the texts that variables and models.yaml have for them


@dataclass(frozen=True)
class SettingKind:
    """What a setting may be.

    Attributes:
        types: of a value.
        expected: what is allowed, in words.
        allows: whether a value of these types is allowed.
        parse: the value that a text stands for; raises ValueError or KeyError.
        written: what a text may be, where `expected` does not say it.
        is_secret: no message shows it. An empty one is refused: it would leave open what somebody wanted to protect.
    """

    types: tuple[type, ...]
    expected: str
    allows: Callable[[Any], bool]
    parse: Callable[[str], Any] = str
    written: str = ""
    is_secret: bool = False

    def __call__(self, value: object) -> Any:
        """What a value of a variable or a file stands for: it may be a text, with a unit for instance.

        Raises:
            ValueError: not allowed; says what is.
        """
        with suppress(ValueError, KeyError):
            found = self.parse(value) if isinstance(value, str) else value
            if self._has_type(found) and self.allows(found):
                return found
        raise ValueError(self.written or self.expected)

    def check(self, name: str, value: object) -> None:
        """
        Raises:
            InvalidArgument: not allowed; the message names the setting, the value, and what is expected.
        """
        given = name if self.is_secret else f"{name}={shown(value)}"
        if not self._has_type(value):
            raise InvalidArgumentType(f"{given}: expected {self.expected}")
        if not self.allows(value):
            raise InvalidArgument(f"{given}: expected {self.expected}")

    def read(self, name: str, text: str) -> Any:
        """The value of the variable `name`.

        Raises:
            InvalidArgument: as `check`.
        """
        try:
            return self(text)
        except ValueError as error:
            given = name if self.is_secret else f"{name}={text!r}"
            raise InvalidArgument(f"{given}: expected {error}") from None

    def _has_type(self, value: object) -> bool:
        return isinstance(value, self.types) and (not isinstance(value, bool) or bool in self.types)


def one_of(*words: str) -> SettingKind:
    """One of these words."""
    return SettingKind((str,), f"one of {', '.join(words)}", words.__contains__)


def whole(least: int, most: int, what: str = "a whole number") -> SettingKind:
    """A whole number."""
    expected = f"{what} from {least} to {most}" if most < MOST_BYTES else f"{what} of at least {least}"
    return SettingKind((int,), expected, lambda value: least <= value <= most, int)


def seconds(least: float, most: int = _DAY_S) -> SettingKind:
    """A time."""
    expected = f"seconds from {least} to {most}"
    written = f"{expected}, or as 500ms, 60s or 1h30m"
    return SettingKind((int, float), expected, lambda value: least <= value <= most, _parse_seconds, written)


def _parse_seconds(text: str) -> float:
    if not re.fullmatch(r"(\d+(\.\d+)?\s*(ms|s|m|h|d)\s*)+", text):
        return float(text)
    return sum(float(number) * _SECONDS[unit] for number, unit in re.findall(r"(\d+(?:\.\d+)?)\s*([a-z]+)", text))


def _parse_bytes(text: str) -> int:
    ((number, unit),) = re.findall(r"\A(\d+(?:\.\d+)?)\s*([A-Za-z]*)\Z", text.strip())
    return int(Decimal(number) * _UNITS[unit.upper()])


FLAG = SettingKind(
    (bool,), "True or False", lambda _: True, lambda text: _FLAGS[text.lower()], f"one of {', '.join(_FLAGS)}"
)
_FLAG_OR_AUTO = SettingKind(
    (bool, str),
    f"auto, or {FLAG.expected}",
    lambda value: value == "auto" or isinstance(value, bool),
    lambda text: text if text == "auto" else FLAG.parse(text),
    f"auto, or {FLAG.written}",
)
BYTES = replace(whole(0, MOST_BYTES), parse=_parse_bytes, written="a number of bytes, as 1073741824, 30GiB or 500MB")
TOKEN = SettingKind(  # what HTTP's headers take
    (str,),
    "printable ASCII without spaces, at least one character (unset: no token)",
    lambda token: token != "" and all("!" <= letter <= "~" for letter in token),
    is_secret=True,
)


def read_plain_file(path: Path) -> str:
    """What a small file says, read without waiting for anybody to write it: some are read while requests are served.

    Raises:
        OSError: it cannot be read, is no plain file, or has more than `MOST_FILE_BYTES`.
        UnicodeDecodeError: it is not UTF-8.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "expected a plain file, not a folder, a pipe or a device", str(path))
    with path.open("rb") as file:
        content = file.read(MOST_FILE_BYTES + 1)
    if len(content) > MOST_FILE_BYTES:
        raise OSError(errno.EFBIG, f"expected at most {MOST_FILE_BYTES} bytes", str(path))
    return content.decode()


def token_of(variable: str, environment: Mapping[str, str]) -> str | None:
    """A variable's token, or what is in the file that `<variable>_FILE` names; None if neither is set.

    Raises:
        InvalidArgument: both are set, or the file cannot be read or holds no token.
    """
    file = environment.get(f"{variable}_FILE")
    if not file:
        return environment.get(variable)
    if variable in environment:
        raise InvalidArgument(f"{variable}_FILE={file!r}: {variable} is set, too: expected one of them")
    try:
        text = read_plain_file(Path(file)).strip()
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"{variable}_FILE={file!r}: expected a file that can be read: {error}") from None
    return str(TOKEN.read(f"{variable}_FILE", text))


_BYTES_OR_AUTO = SettingKind(
    (int, str),
    f"auto, or {BYTES.expected}",
    lambda value: value == "auto" or (isinstance(value, int) and BYTES.allows(value)),
    lambda text: text if text == "auto" else _parse_bytes(text),
    f"auto, or {BYTES.written}",
)
_VAULT_PLACE = SettingKind(
    (str,),
    "off, auto, or the path of a vault's socket (with a slash)",
    lambda place: place in ("off", "auto") or ("/" in place and "\0" not in place),
)
_METHODS = SettingKind(
    (tuple,),
    "a tuple of method names (in a variable, names are separated by commas)",
    lambda methods: all(isinstance(method, str) and method.isidentifier() for method in methods),
    lambda text: tuple(method.strip() for method in text.split(",")),
)


def is_socket(path: str) -> bool:
    """Whether a Unix socket can have this path: unix(7)."""
    return path.startswith("/") and "\0" not in path and len(os.fsencode(path)) <= MOST_SOCKET_BYTES


def _is_address(address: str) -> bool:
    if address.startswith("unix:"):
        return is_socket(address.removeprefix("unix:"))
    host, _, port = address.rpartition(":")
    try:
        ipaddress.ip_address(host[1:-1] if host.startswith("[") and host.endswith("]") else host)
    except ValueError:
        return False
    return port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16 and (":" not in host or host[0] == "[")


_ADDRESS = SettingKind(
    (str,),
    f"unix:/PATH of at most {MOST_SOCKET_BYTES} bytes, or an IP address and port as 127.0.0.1:9001",
    _is_address,
)


# The dataclasses

_Fields = TypeVar("_Fields", bound="_FromEnvironment")


def setting(kind: Callable[[object], Any], default: Any, text: str, said: str = "") -> Any:
    """A field.

    Args:
        kind: what a value stands for, as a `SettingKind`.
        text: what it does, in Markdown: the page's own words, which `--help` and docstrings share.
        said: how the page writes the default.
    """
    metadata = {"kind": kind, "text": text, "said": said or _said(default)}
    how: dict[str, Any] = {"default_factory": dict} if default == {} else {"default": default}
    return field(**how, metadata=metadata, repr=not getattr(kind, "is_secret", False))


def _said(default: object) -> str:
    if default in (None, (), {}):
        return "none"
    return f"`{int(default)}`" if isinstance(default, bool) else f"`{default}`"


def plain(text: str) -> str:
    """Markdown without its links, for a terminal or a docstring."""
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)


class _FromEnvironment:
    """What a dataclass of settings can do."""

    def __post_init__(self) -> None:
        for each in fields(self):  # type: ignore[arg-type]
            if (value := getattr(self, each.name)) is not None or each.default is not None:
                each.metadata["kind"].check(each.name, value)

    @classmethod
    def from_environment(cls: type[_Fields], environment: Mapping[str, str] | None = None) -> _Fields:
        """Settings from `CUMEM_SLEEP_<FIELD>` variables; one that is unset or empty leaves the default (but an empty
        token is refused).

        Raises:
            InvalidArgument: a variable has a bad value; the message names the variable, the value (never a token's)
                and what is allowed.
        """
        environment = os.environ if environment is None else environment
        values: dict[str, Any] = {}
        for each in fields(cls):  # type: ignore[arg-type]
            variable, kind = PREFIX + each.name.upper(), each.metadata["kind"]
            text = token_of(variable, environment) if kind.is_secret else environment.get(variable, "").strip() or None
            if text is not None:
                values[each.name] = kind.read(variable, text)
        return cls(**values)

    def summary(self) -> str:
        """The fields that differ from their defaults, for a log line."""
        each_field = fields(self)  # type: ignore[arg-type]
        changed = [f"{f.name}={getattr(self, f.name)!r}" for f in each_field if getattr(self, f.name) != f.default]
        return "settings: " + (", ".join(changed) or "the defaults")


def _documented(cls: type[_Fields]) -> type[_Fields]:
    """Adds the fields to its docstring."""
    rows = [f"    {f.name}: {plain(f.metadata['text'])}" for f in fields(cls)]  # type: ignore[arg-type]
    raised = "InvalidArgument: a value is not allowed; the message names the field, the value and what is allowed."
    if cls.__doc__ is not None:  # as with -OO
        cls.__doc__ = "\n".join([f"{cls.__doc__}\n", "Attributes:", *rows, "\nRaises:", f"    {raised}\n"])
    return cls


@_documented
@dataclass(frozen=True)
class Settings(_FromEnvironment):
    """How the layer behaves. Immutable; `Settings.from_environment()` is what the allocator uses by default."""

    driver: str = setting(
        one_of("cuda", "sim"),
        "cuda",
        "`cuda`: libcuda. `sim`: the simulated driver, which needs no GPU, and whose times mean nothing.",
    )
    host_budget_bytes: int | None = setting(
        BYTES, None, "The most pinned host memory that backups may take: `30GiB`, `500MB`, `1073741824`."
    )
    retain_backups: bool = setting(
        FLAG, True, "`0`: every wake releases the host memory, and every sleep copies everything."
    )
    verify: str = setting(
        one_of("off", "wake"), "wake", "`wake`: check the digest of every restored segment. `off`: trust the copies."
    )
    poison: bool = setting(
        FLAG,
        False,
        "`1`: fill dropped memory with NaN (0xFF) at the wake, except `kv_cache`, so that missing reloads show up.",
    )
    prefault_threads: int | None = setting(
        whole(1, 1024),
        None,
        "Threads that prefault new host memory ahead of the copies, up to 1024.",
        "¾ of the cores, at most 16",
    )
    prepare: bool | str = setting(
        _FLAG_OR_AUTO,
        "auto",
        "`1`: start `prepare()` whenever a memory pool is left; in vLLM, after its warm-up. `auto`: in vLLM, after its"
        " warm-up, [where host memory has room](vllm.md#backups-made-ahead).",
    )
    prepare_bytes_per_second: int = setting(
        BYTES,
        5_000_000_000,
        "The most that `prepare()` copies per second while the model runs; `0`: no limit.",
        "`5GB`",
    )
    compress: str = setting(
        one_of("off", "auto"),
        "off",
        "`auto`: compress backups, without loss, where it pays off. `off`: store the bytes as they are.",
    )
    vault: str = setting(
        _VAULT_PLACE,
        "off",
        "Where backups are stored. `off`: in pinned memory of the process. `auto`: in [the vault](vault.md) if one"
        " answers at its default socket, otherwise as `off`. A path: in the vault with that socket.",
    )
    keep_kv_bytes: int | str = setting(
        _BYTES_OR_AUTO,
        0,
        "In vLLM 0.26 and 0.33: how many bytes of each worker's KV cache"
        " [survive a sleep](vllm.md#a-kv-cache-that-survives) at level 1 or 3. `auto`: what host memory has left,"
        " shared by the workers of a host.",
    )
    agreement_timeout_s: float = setting(
        seconds(0.1),
        60.0,
        "Where several ranks sleep and wake together: how many seconds a rank that is ready waits for the others"
        " before all undo their half.",
    )
    deep_after_s: float | None = setting(
        seconds(0.1),
        None,
        "After how many seconds a process that sleeps at level 1 or 2 goes on to"
        " [level 3](how-it-works.md#level-3) by itself.",
    )
    resume_wait_s: float = setting(
        seconds(0),
        10.0,
        "How many seconds `resume` of [torch_memory_saver's interface](torch-memory-saver.md) waits for device memory"
        " that others are just releasing, before it raises.",
        "`10`",
    )


@_documented
@dataclass(frozen=True)
class GateSettings(_FromEnvironment):
    """How the gate answers for a sleeping model. Immutable; `CUMEM_SLEEP_<FIELD>` in the environment."""

    on_request: str = setting(
        one_of("reject", "wait", "wake"),
        "reject",
        "What happens to a request while the model sleeps. `reject`: it gets 503. `wait`: it is held until somebody"
        " wakes the model. `wake`: it wakes the model.",
    )
    request_deadline_s: float = setting(
        seconds(0),
        60.0,
        "How long `wait` and `wake` hold a request before its 503, and how long a sleep waits for running requests,"
        " in seconds.",
        "`60`",
    )
    retry_after_s: int = setting(
        whole(1, _DAY_S, "a whole number of seconds"),
        5,
        "The `Retry-After` of the 503, and the pause after a failed wake, in whole seconds.",
    )
    health: str = setting(
        one_of("auto", "ok", "unavailable"),
        "auto",
        "`/health` and `/ping` while the model sleeps. `auto`: 200 with `wait` and `wake` (503 while wakes fail), 503"
        " with `reject`. `ok`: 200. `unavailable`: 503.",
    )
    admin_token: str | None = setting(
        TOKEN,
        None,
        "With it, [whatever changes the server's state](vllm-routes.md) (sleep, wake, pause, reload, weight updates,"
        " adapters, …) needs `Authorization: Bearer <token>`; otherwise it gets 401.",
    )
    idle_s: float | None = setting(
        seconds(1),
        None,
        "After how many seconds without a request the model sleeps by itself; with `wait` or `wake` alone. The sleep"
        " begins at most 0.25 s later, if the engine answers at once.",
    )
    idle_level: int = setting(
        whole(1, 2), 1, "The level of that sleep; `CUMEM_SLEEP_DEEP_AFTER_S` takes it to level 3 later."
    )
    idle_awake_s: float = setting(
        seconds(0),
        0.0,
        "How long a model that was woken stays awake at least, in seconds, if that is longer than"
        " `CUMEM_SLEEP_IDLE_S`.",
        "`0`",
    )
    admin: str | None = setting(
        _ADDRESS,
        None,
        "Where the gate alone listens for [the paths of a sleep](vllm.md#security), so that the public port answers"
        " 404: `unix:/PATH`, which only this user can open, or `127.0.0.1:9001`, which needs the token.",
    )
    max_held_requests: int = setting(
        whole(0, MOST_BYTES), 4096, "How many requests `wait` and `wake` hold at once. Beyond that they get 503."
    )
    max_held_bytes: int = setting(BYTES, 256 << 20, "How many bytes their bodies may have in total.", "`256MiB`")
    loading_methods: tuple[str, ...] = setting(
        _METHODS,
        (),
        "A trainer's own worker methods that load all weights when `/collective_rpc` calls them, separated by commas.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.idle_s is not None and self.on_request == "reject":
            raise InvalidArgument(
                f"{PREFIX}IDLE_S={self.idle_s:g}: requests would be refused as soon as the model sleeps by itself:"
                f" expected {PREFIX}ON_REQUEST=wake, or wait, too"
            )
        if self.admin is not None and not self.admin.startswith("unix:") and self.admin_token is None:
            raise InvalidArgument(
                f"{PREFIX}ADMIN={self.admin!r}: anybody on this host could put the model to sleep there: expected"
                f" {PREFIX}ADMIN_TOKEN, too, or unix:/PATH"
            )


_OTHERS: dict[Reader, tuple[tuple[str, str, str], ...]] = {
    Reader.GATE: (
        (
            "ADMIN_TOKEN_FILE",
            "none",
            "A file with the token, in place of `CUMEM_SLEEP_ADMIN_TOKEN`.",
        ),
    ),
    Reader.PLUGIN: (
        ("DISABLE", "`0`", "`1`: vLLM keeps its own sleep mode."),
        (
            "VLLM_UNTESTED",
            "`0`",
            "`1`: also serve versions of vLLM that were not tested, if everything that the layer calls is there.",
        ),
    ),
    Reader.COMMANDS: (
        ("SERVE_URL", "`http://127.0.0.1:8000`", "The front to ask."),
        ("SERVE_TOKEN", "none", "Its admin token; for `status`, an API key is enough."),
        ("SERVE_TOKEN_FILE", "none", "A file with the token, in place of `CUMEM_SLEEP_SERVE_TOKEN`."),
    ),
    Reader.SIMULATOR: (
        ("SIM_DEVICE_BYTES", "`1073741824`", "Memory of each simulated GPU, in bytes; no units."),
        ("SIM_DEVICES", "`1`", "How many GPUs there are."),
        (
            "SIM_CONTEXT_BYTES",
            "`0`",
            "Memory that a context takes on its GPU, in bytes: what is left of a process that sleeps.",
        ),
        (
            "SIM_CONTEXT_US_PER_MIB",
            "`0`",
            "Microseconds that a new context takes for each MiB of registered host memory; on H200s about 21.",
        ),
        (
            "SIM_FAIL",
            "none",
            "Failures to start with, as"
            " `cuMemCreate:3:CUDA_ERROR_OUT_OF_MEMORY:2,cuInit:0:CUDA_ERROR_NO_DEVICE:1`: the call, how many of it"
            " succeed first, the error, how many fail.",
        ),
        (
            "SIM_DEVICE_ORDER",
            "none",
            "As `CUDA_VISIBLE_DEVICES`: with `2,0` device 0 is the host's third GPU, device 1 its first.",
        ),
        (
            "SIM_DRIVER_VERSION",
            "`13000`",
            "What `cuDriverGetVersion` returns. Below `12080` there are no process checkpoints.",
        ),
        (
            "SIM_COPY_DELAY_US",
            "`200`",
            "How many microseconds longer each copy takes, to catch who does not wait for it.",
        ),
        (
            "SIM_FABRIC",
            "`0`",
            "`1`: the GPUs claim to support fabric handles, and refuse them, as on some hosts.",
        ),
        (
            "SIM_HOST_POINTERS",
            "`1`",
            "`0`: kernels cannot access registered host memory by its host address.",
        ),
        (
            "SIM_INTEGRATED",
            "`0`",
            "`1`: the GPUs' memory is the host's, as on GB10.",
        ),
    ),
}


def _variables() -> dict[str, Variable]:
    rows = [
        Variable(PREFIX + each.name.upper(), reader, each.metadata["said"], each.metadata["text"])
        for reader, settings in ((Reader.LAYER, Settings), (Reader.GATE, GateSettings))
        for each in fields(settings)
    ]
    for reader, others in _OTHERS.items():
        rows += [Variable(PREFIX + name, reader, default, text) for name, default, text in others]
    return {row.name: row for row in rows}


# By name, in the order of the page.
VARIABLES: Mapping[str, Variable] = _variables()
