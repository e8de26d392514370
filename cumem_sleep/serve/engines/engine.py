"""What every engine has: how its server is started, and the calls by which it sleeps and wakes."""

from __future__ import annotations

import asyncio
import functools
import ssl
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, ClassVar

import httpx

from ...http.asgi import within
from ..address import Address
from ..command import LOOPBACK, inner_words, is_loopback, values
from ..events import Outcome
from ..status import Phase

ASK_WITHIN_S = 10.0
ASK_EVERY_S = 0.2
MOST_ANSWER_BYTES = 16 << 20
METRICS_WITHIN_S = 5.0  # Prometheus itself waits for 10 s
MOST_METRICS_BYTES = 4 << 20
MOST_SAID = 500  # letters of what a server says in words: they are logged, and in every status
_PLAIN = "identity"
_LEAVE_OPEN = "is for this front to choose: leave it out, or leave it open with {port} or {socket}"


@dataclass(frozen=True)
class Facts:
    """What a server says of its memory, and of this package's layer.

    Attributes:
        layer: the version of cumem-sleep in it; "" if it is not in it, None if that is not known.
        host_bytes: what its backups take at level 1; None if that is not known.
        backed_up_bytes: of these, what they take already: they are prepared while it is awake, and kept when it wakes.
        vault: the socket of the `cumem-sleep vault` that keeps its backups; "" if its own memory does.
        mapped_bytes: of its GPUs' memory, what is mapped for weights and KV cache; None if that is not known.
        wake_bytes: what a wake maps on one of its GPUs, that where it is most; None if that is not known.
        pids: of its workers, by which the vault knows them.
    """

    layer: str | None = None
    host_bytes: int | None = None
    backed_up_bytes: int = 0
    vault: str = ""
    mapped_bytes: int | None = None
    wake_bytes: int | None = None
    pids: tuple[int, ...] = ()


class Failed(Exception):
    """A call was answered with an error.

    Attributes:
        is_unknown: the server has no such path.
    """

    def __init__(self, why: str, is_unknown: bool = False) -> None:
        super().__init__(why)
        self.is_unknown = is_unknown


class Engine(ABC):
    """One server. A call never raises: it ends in an `Outcome`, which names a state only if that is certain.

    The class knows the commands that start such servers.

    Attributes:
        NAME: in models.yaml.
        LEVELS: of sleep that it has. Without any it is stopped instead.
        BY_URL: it may be a server that somebody else started: it says itself whether it sleeps.
        PROGRAM: such a command, for people.
        SERVING: programs that are such a server with `serve` as their first argument.
        MODULE: the module that Python runs for one; "": nobody knows what starts such a server.
        OPEN: options of a command that are for the front to choose, with what leaves them open.
        IN_SHELL: what a command within a shell, where no argument is added, has to say.
        health: the path of its health check.
        has_layer: cumem-sleep is in it, as far as is known.
        kept_bytes: of its KV cache, what it keeps in host memory while it sleeps, as it has said last.
    """

    NAME: ClassVar[str]
    LEVELS: ClassVar[tuple[int, ...]]
    BY_URL: ClassVar[bool] = False
    PROGRAM: ClassVar[str] = ""
    SERVING: ClassVar[tuple[str, ...]] = ()
    MODULE: ClassVar[str] = ""
    OPEN: ClassVar[Mapping[str, str]] = {}
    IN_SHELL: ClassVar[str] = ""

    # Its command

    @classmethod
    def is_started_by(cls, command: Sequence[str]) -> bool:
        """Whether words start such a server, however it is reached."""
        file = f"{cls.MODULE.replace('.', '/')}.py"
        for word, following in zip_longest(command, command[1:], fillvalue=""):
            program = word.removeprefix("-m").rpartition("/")[2]  # `python -mMODULE` is allowed, too
            if program in cls.SERVING and following == "serve":
                return True
            if cls.MODULE and (program == cls.MODULE or word.endswith(file)):
                return True
        return False

    @staticmethod
    def _lacking(words: Sequence[str], wanted: Mapping[str, str]) -> list[str]:
        """The options of `wanted`, with their values, that a command does not have."""
        return [word for option, value in wanted.items() if not values(words, option) for word in (option, value)]

    @classmethod
    def uses_socket(cls, command: Sequence[str]) -> bool:
        """Whether a server listens on a Unix socket: where its command says so."""
        return any("{socket}" in word for word in command) and not any("{port}" in word for word in command)

    @classmethod
    def is_complete(cls, words: Sequence[str]) -> bool:
        """Whether a command within a shell says all that the front would add."""
        return True

    @classmethod
    def token(cls, command: Sequence[str], variables: Mapping[str, str], api_key: str | None) -> str | None:
        """What opens the calls for sleep of a server with these variables; None where there is no such token."""
        return None

    @classmethod
    def completed(
        cls, words: Sequence[str], names: Sequence[str], address: Address, token: str | None, from_vault: bool = False
    ) -> list[str]:
        """A command with what it needs here: where it listens, its names, sleep mode; its weights from the vault."""
        return list(words)

    @classmethod
    def environment(
        cls, command: Sequence[str], variables: Mapping[str, str], api_key: str | None, token: str | None
    ) -> dict[str, str]:
        """A server's variables, with what its engine needs."""
        return dict(variables)

    @classmethod
    def words(cls, command: Sequence[str]) -> list[str]:
        """The words of a command; where it is not the engine itself, those of texts in it for a shell, too."""
        return list(command) if cls.is_started_by(command) else inner_words(command)

    @classmethod
    def listening_host(cls, command: Sequence[str]) -> str:
        """Where a server with a port listens."""
        return ([LOOPBACK] + [host for host in values(cls.words(command), "--host") if is_loopback(host)])[-1]

    @classmethod
    def wrong_places(cls, command: Sequence[str]) -> Iterator[str]:
        """What is wrong with where a server would listen."""
        words = cls.words(command)
        for host in values(words, "--host"):
            if not is_loopback(host):
                where = host or repr(host)
                yield f"--host {where} would open the server to the network: leave it out, or listen at {LOOPBACK}"
        if not cls.is_started_by(words):
            if not any("{port}" in word or "{socket}" in word for word in words):
                yield "does not say where it listens: put {port} or {socket} where it belongs"
            return
        for option, open_value in cls.OPEN.items():
            if any(value != open_value for value in values(words, option)):
                yield f"{option} {_LEAVE_OPEN}"
        if not cls.is_started_by(command) and not cls.is_complete(words):
            yield f"runs {cls.PROGRAM} through a shell, where no argument is added: write {cls.IN_SHELL}, there"

    # Its calls

    def __init__(self, address: Address, within_s: float, transport: httpx.AsyncBaseTransport | None = None) -> None:
        """`within_s`: what a sleep or wake may take. `transport`: how it is reached, if not by its address."""
        if address.socket is not None:
            transport = httpx.AsyncHTTPTransport(uds=address.socket, verify=_certificates())
        self.address = address
        self.health = "/health"
        self.has_layer = False
        self.kept_bytes = 0
        self._within_s = within_s
        self._client = httpx.AsyncClient(
            transport=transport,
            base_url=address.base_url,
            headers={"Accept-Encoding": _PLAIN, **dict(address.control)},
            timeout=within_s,
            verify=_certificates(),
            trust_env=False,  # a proxy for the world is none for this machine's servers
        )

    async def close(self) -> None:
        """Close its connections."""
        await self._client.aclose()

    async def is_healthy(self) -> bool:
        """Whether it answers its health check with success: on a connection of its own, as requests need one."""
        try:
            return (await self.ask("GET", self.health, ASK_WITHIN_S, headers={"Connection": "close"})).is_success
        except (httpx.HTTPError, OSError):
            return False

    @abstractmethod
    async def look(self) -> Outcome:
        """What it is in now."""

    def note(self, state: Phase) -> None:  # noqa: B027
        """What it is in by its memory, where it does not say so itself."""

    @abstractmethod
    async def sleep(self, level: int, from_level: int | None = None) -> Outcome:
        """Put it to sleep, perhaps from a lesser sleep."""

    @abstractmethod
    async def wake(self, level: int) -> Outcome:
        """Wake it from this level."""

    @abstractmethod
    async def facts(self) -> Facts:
        """What it says of its memory."""

    async def give_up_kept(self) -> str:
        """Have it give up the KV cache that it keeps while it sleeps; returns why it did not, in words, or ""."""
        return ""

    async def wake_bytes(self) -> int | None:
        """What a wake maps on one of its GPUs, that where it is most; None where nobody knows."""
        return (await self.facts()).wake_bytes

    async def learn_version(self) -> None:
        """Find out what depends on its version."""
        return

    async def metrics(self) -> str:
        """Its own page for Prometheus. No server wakes for it.

        Raises:
            Failed.
        """
        plain = {"Accept": "text/plain; version=0.0.4"}
        try:
            answer = await self.ask("GET", "/metrics", METRICS_WITHIN_S, MOST_METRICS_BYTES, headers=plain)
            if answer.status_code == httpx.codes.OK:
                return answer.content.decode()
            raise Failed(f"/metrics: {answer.status_code}")  # clients may see this: no address
        except (httpx.HTTPError, OSError, ValueError) as error:
            raise Failed(f"/metrics: {type(error).__name__}") from None

    async def names(self) -> tuple[str, ...]:
        """The names that it knows its model by, adapters among them; empty if it does not say."""
        try:
            answer = await self.ask("GET", "/v1/models", ASK_WITHIN_S)
            return tuple(str(card["id"]) for card in answer.raise_for_status().json()["data"])
        except (httpx.HTTPError, OSError, ValueError, KeyError, TypeError):
            return ()

    async def ask(
        self,
        method: str,
        path: str,
        within_s: float | None = None,
        most_bytes: int = MOST_ANSWER_BYTES,
        **asked: Any,
    ) -> httpx.Response:
        """One call, with its whole answer: what comes bit by bit, or does not end, is no answer.

        Args:
            within_s: without it, what a sleep or wake may take.
        """
        limit_s = self._within_s if within_s is None else within_s
        try:
            return await within(limit_s, self._whole(method, path, most_bytes, **asked))
        except asyncio.TimeoutError:
            raise httpx.ReadTimeout(f"no whole answer within {limit_s:g} s") from None

    async def _whole(self, method: str, path: str, most_bytes: int, **asked: Any) -> httpx.Response:
        content = bytearray()
        try:
            async with self._client.stream(method, path, **asked) as answer:
                encoding = answer.headers.get("content-encoding", _PLAIN)
                if encoding != _PLAIN:  # it might grow beyond bounds
                    raise httpx.DecodingError(f"its answer is compressed ({encoding[:20]!r}), and was not to be")
                async for piece in answer.aiter_bytes():
                    content += piece
                    if len(content) > most_bytes:
                        raise httpx.ReadError(f"its answer has more than {most_bytes >> 20} MiB")
            return _WholeAnswer(answer.status_code, content=bytes(content), request=answer.request)
        finally:
            content.clear()  # an error keeps it until the next collection, and these are seldom in the front


class _WholeAnswer(httpx.Response):
    def json(self, **options: Any) -> Any:
        try:
            return super().json(**options)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Read once: each client would otherwise read them anew, and keep them."""
    return ssl.create_default_context()


def error_of(answer: httpx.Response) -> str:
    """The message of an error, in whichever shape it comes."""
    try:
        body: Any = answer.json()
    except ValueError:
        return answer.text[:MOST_SAID]
    found = body.get("error", body) if isinstance(body, dict) else body
    return str(found.get("message", found) if isinstance(found, dict) else found)[:MOST_SAID]


def text_of(error: Exception) -> str:
    """An error's kind, and what it says."""
    return f"{type(error).__name__}{f': {error}' if str(error) else ''}"
