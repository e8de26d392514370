"""vLLM: its command, and its HTTP calls for sleep mode; what is certain when a call fails or its answer is lost."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import httpx

from ..address import Address
from ..command import LOOPBACK, packages_beside, values
from ..events import Outcome
from ..policy import OF_LAYER
from ..status import Phase
from .engine import ASK_EVERY_S, ASK_WITHIN_S, MOST_SAID, Engine, Facts, Failed, error_of, text_of

GATE = "cumem_sleep.vllm.SleepGate"
_RESET = "/reset_prefix_cache"
TRIES = 3
_LOST = (httpx.codes.BAD_GATEWAY, httpx.codes.GATEWAY_TIMEOUT)
_LACKS_HOST_MEMORY = ("host memory", "outofhostmemory", "no vault answers")  # in the layer's errors
_IN_ENGINE = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{.*\})? (\S+)$", re.MULTILINE)
_NO_SLEEP_MODE = (
    "its server has no calls for sleep: it needs --enable-sleep-mode, and the gate of cumem-sleep with its api_key as"
    " CUMEM_SLEEP_ADMIN_TOKEN, or VLLM_SERVER_DEV_MODE=1"
)


class VllmEngine(Engine):
    """A server of vLLM.

    An error is followed by a state only if that is certain. vLLM's own layer may fail midway, and then says what is not
    so; the layer of this package does all of a sleep or wake, or nothing.

    Attributes:
        has_gate: the layer's gate is in it. Without it, in vLLM's development mode, `/collective_rpc` asks the layer.
        stops_requests: its sleep ends requests that run, as far as is known; before 0.18 vLLM pulls memory from under
            them.
    """

    NAME = "vllm"
    LEVELS = (1, 2, OF_LAYER)
    BY_URL = True
    PROGRAM = "vllm serve"
    SERVING = ("vllm", "vllm.entrypoints.cli.main")
    MODULE = "vllm.entrypoints.openai.api_server"
    OPEN: ClassVar[Mapping[str, str]] = {"--port": "{port}", "--uds": "{socket}"}
    IN_SHELL = f"--uds {{socket}}, or --host {LOOPBACK} --port {{port}}"

    # Its command

    @classmethod
    def uses_socket(cls, command: Sequence[str]) -> bool:
        """On a Unix socket unless its command says otherwise."""
        if any("{port}" in word for word in command):
            return False
        return any("{socket}" in word for word in command) or cls.is_started_by(command)

    @classmethod
    def is_complete(cls, words: Sequence[str]) -> bool:
        """Whether it listens where it should with these words alone."""
        return bool(values(words, "--uds") or (values(words, "--host") and values(words, "--port")))

    @classmethod
    def token(cls, command: Sequence[str], variables: Mapping[str, str], api_key: str | None) -> str | None:
        """Of the gate, where it is there."""
        return (api_key or secrets.token_hex(16)) if has_gate(command, variables) else None

    @classmethod
    def completed(
        cls, words: Sequence[str], names: Sequence[str], address: Address, token: str | None, from_vault: bool = False
    ) -> list[str]:
        """With where it listens, and its names, sleep mode, the gate, and where weights come from."""
        if not cls.is_started_by(words):
            return list(words)
        # Without --host it would listen on every interface.
        tcp = {"--host": cls.listening_host(words), "--port": address.port}
        listens = tcp if address.socket is None else {"--uds": address.socket}
        added = cls._lacking(words, listens)
        if "--enable-sleep-mode" not in words:
            added.append("--enable-sleep-mode")
        if token is not None and not any(GATE in word for word in words):
            added += ["--middleware", GATE]
        if not values(words, "--served-model-name"):
            added += ["--served-model-name", *names]
        if from_vault and token is not None and not values(words, "--load-format"):  # the loader comes with the gate
            added += ["--load-format", "cumem_sleep"]
        return [*words, *added]

    @classmethod
    def environment(
        cls, command: Sequence[str], variables: Mapping[str, str], api_key: str | None, token: str | None
    ) -> dict[str, str]:
        """Backups are to be made before the first sleep; without the gate, sleep is there in development mode only."""
        own = {"CUMEM_SLEEP_PREPARE": "1"}
        if api_key is not None:
            own["VLLM_API_KEY"] = api_key  # so that it need not stand in the command, which everybody may read
        if token is None:
            return {**own, "VLLM_SERVER_DEV_MODE": "1", **variables}
        return {**own, **variables, "CUMEM_SLEEP_ADMIN_TOKEN": token, "CUMEM_SLEEP_ADMIN_TOKEN_FILE": ""}

    # Its calls

    def __init__(self, address: Address, within_s: float, transport: httpx.AsyncBaseTransport | None = None) -> None:
        super().__init__(address, within_s, transport)
        self.has_gate = False
        self.stops_requests = True
        self._is_half_woken = False

    async def look(self) -> Outcome:
        """What it is in now. A sleep of which nobody knows the level is taken for one that lost the weights."""
        if self._is_half_woken:
            woken = await self.wake(2)
            if woken.error is not None:
                return woken
        try:
            answer = await self.ask("GET", "/is_sleeping", within_s=ASK_WITHIN_S)
            if answer.status_code == httpx.codes.NOT_FOUND:
                return Outcome(_NO_SLEEP_MODE)
            answer.raise_for_status()
            sleeps = answer.json()["is_sleeping"]
        except httpx.ConnectError as error:
            return Outcome(f"no server answers there: {error}", Phase.STOPPED)
        except (httpx.HTTPError, OSError, ValueError, KeyError, TypeError) as error:
            return Outcome(f"it does not say whether it sleeps: {text_of(error)}")
        if not sleeps:
            return Outcome(None, Phase.AWAKE)
        # Its engine may take for asleep what its workers have mapped: after a wake that failed half-way, or a pause.
        facts = await self.facts() if self.has_layer else Facts("")
        if facts.layer is None:
            return Outcome("it says that it sleeps, and its workers do not say what they have mapped")
        if mapped := facts.mapped_bytes:
            return Outcome(f"it says that it sleeps, and its workers have {mapped / (1 << 30):.1f} GiB mapped")
        has_backups = facts.host_bytes is not None and facts.backed_up_bytes >= facts.host_bytes
        return Outcome(None, Phase.ASLEEP, 1 if has_backups else 2)

    async def sleep(self, level: int, from_level: int | None = None) -> Outcome:
        """Put it to sleep, perhaps from a lesser sleep, from which it has to wake first; but not to get from 1 to 3.

        Level 3 is level 1, and then the layer's: vLLM has none, or takes it for 2.
        """
        if from_level == 1 and level == OF_LAYER:
            return await self._deepen()
        if from_level is not None:
            woken = await self.wake(from_level)
            if woken.error is not None:
                return woken
        try:
            if not self.stops_requests and not await self._is_idle():
                return Outcome("requests that were ended still run in its engine", Phase.AWAKE)
            await self._post("/sleep", level=1 if level == OF_LAYER else level)
        except Failed as error:
            if error.is_unknown:
                return Outcome(str(error), Phase.AWAKE)
            state = await self._after_failed_sleep()
            lacks = any(words in str(error).lower() for words in _LACKS_HOST_MEMORY)
            return Outcome(str(error), state, lacks_host_memory=lacks and state is Phase.AWAKE)
        except (httpx.HTTPError, OSError) as error:
            return Outcome(f"/sleep: {text_of(error)}")
        return await self._deepen() if level == OF_LAYER else Outcome(None, Phase.ASLEEP, level)

    async def _deepen(self) -> Outcome:
        """From level 1 to 3. Whatever becomes of it, the server sleeps, and is woken from either in the same way."""
        if not self.has_layer:
            return Outcome(None, Phase.ASLEEP, 1, why_not_deeper="cumem-sleep is not in its server")
        path = "/sleep" if self.has_gate else "/collective_rpc"
        try:
            if self.has_gate:
                deep = _check(path, await self.ask("POST", path, params={"level": OF_LAYER})).json()
                level, why = int(deep["level"]), str(deep.get("why_not_deeper", ""))
            else:
                answer = _check(path, await self.ask("POST", path, json={"method": "cumem_sleep_deepen"}))
                workers = answer.json()["results"]
                why = next((str(each["why"]) for each in workers if each["why"]), "")
                level = OF_LAYER if all(each["checkpointed"] for each in workers) else 1
            return Outcome(None, Phase.ASLEEP, level, why_not_deeper=why[:MOST_SAID])
        except (Failed, httpx.HTTPError, OSError, ValueError, KeyError, TypeError) as error:
            return Outcome(None, Phase.ASLEEP, 1, why_not_deeper=f"{path}: {text_of(error)}")

    async def wake(self, level: int) -> Outcome:
        """Wake it from this level; weights that were dropped are loaded again before the KV cache comes."""
        try:
            if level == 2:
                self._is_half_woken = True
                await self._post("/wake_up", tags="weights")
                await self._reload()
                await self._post("/wake_up", tags="kv_cache")
                self._is_half_woken = False
            else:
                await self._post("/wake_up")
        except Failed as error:
            is_certain = self.has_layer and level != 2 and (await self.look()).state is Phase.ASLEEP
            return Outcome(str(error), Phase.ASLEEP if is_certain else None, level)
        except (httpx.HTTPError, OSError) as error:
            return Outcome(f"/wake_up: {text_of(error)}")
        return Outcome(None, Phase.AWAKE)

    async def _after_failed_sleep(self) -> Phase | None:
        """VLLM has paused its scheduler before the sleep that failed, and takes that for asleep: a wake resumes it."""
        if not self.has_layer:
            return None
        try:
            await self._post("/wake_up")
        except (Failed, httpx.HTTPError, OSError):
            return None
        return Phase.AWAKE if (await self.look()).state is Phase.AWAKE else None

    async def facts(self) -> Facts:
        """What it says of the layer in it."""
        try:
            answer = await self.ask("GET", "/cumem_sleep/status", within_s=ASK_WITHIN_S)
            self.has_gate = answer.status_code != httpx.codes.NOT_FOUND
            if not self.has_gate:
                body = {"method": "cumem_sleep_status"}
                answer = await self.ask("POST", "/collective_rpc", json=body, within_s=ASK_WITHIN_S)
            if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE:  # the gate has no answer of the workers
                return Facts()
            if not answer.is_success:
                return Facts("")
            workers = answer.json()["results"]
            usage = [tag for worker in workers for name, tag in worker["usage"].items() if name != "kv_cache"]
            host_bytes = sum(int(tag["bytes"]) for tag in usage)
            self.has_layer = host_bytes > 0  # the plugin may be there, and vLLM's memory not come from it
            if not self.has_layer:
                return Facts("")
            backed_up_bytes = sum(int(tag["backed_up_bytes"]) for tag in usage)
            vault = workers[0].get("place", {}).get("vault", "")
            if not isinstance(vault, str) or not vault.isprintable():
                raise ValueError(f"a vault at {vault!r}")
            version = str(workers[0].get("version", "active"))[:MOST_SAID]
            self.kept_bytes = sum(_kept_bytes(tag) for worker in workers for tag in worker["usage"].values())
            mapped_bytes, wake_bytes = _mapped_and_missing(worker["usage"].values() for worker in workers)
            pids = tuple(int(worker["pid"]) for worker in workers if "pid" in worker)
            return Facts(version, host_bytes, backed_up_bytes, vault, mapped_bytes, wake_bytes, pids)
        except (httpx.HTTPError, OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError):
            return Facts()

    async def give_up_kept(self) -> str:
        """Have it give up the KV cache that it keeps while it sleeps; returns why it did not, in words, or ""."""
        try:
            _check(_RESET, await self.ask("POST", _RESET, ASK_WITHIN_S))
        except (Failed, httpx.HTTPError, OSError) as error:
            return text_of(error)
        await self.facts()
        return f"it still keeps {self.kept_bytes} bytes" if self.kept_bytes else ""

    async def wake_bytes(self) -> int | None:
        """The layer in it says that; it is not asked where there is none."""
        return (await self.facts()).wake_bytes if self.has_layer else None

    async def learn_version(self) -> None:
        """Find out whether its sleep stops requests."""
        with contextlib.suppress(httpx.HTTPError, OSError, ValueError, KeyError, TypeError):
            answer = await self.ask("GET", "/version", within_s=ASK_WITHIN_S)
            if numbers := re.match(r"(\d+)\.(\d+)", str(answer.json()["version"])):
                self.stops_requests = (int(numbers[1]), int(numbers[2])) >= (0, 18)

    async def _is_idle(self) -> bool:
        """Whether no request is in its engine any more, in time: it hears of clients that left only after a while.

        Without vLLM's metrics (`--disable-log-stats`) nobody can tell.
        """
        until = time.monotonic() + self._within_s
        while True:
            answer = await self.ask("GET", "/metrics", within_s=ASK_WITHIN_S)
            if not any(float(count) for count in _IN_ENGINE.findall(answer.text)):
                return True
            if time.monotonic() >= until:
                return False
            await asyncio.sleep(ASK_EVERY_S)

    async def _reload(self) -> None:
        """By the path of newer servers and of this package's gate, or else by the worker's method."""
        try:
            await self._post("/reload_weights")
        except Failed as error:
            if not error.is_unknown:
                raise
            body = {"method": "reload_weights"}
            answer = _check("/collective_rpc", await self.ask("POST", "/collective_rpc", json=body))
            if names := _left_out(answer):
                raise Failed(f"reload_weights left out weights that level 2 dropped: {names}") from None

    async def _post(self, path: str, **query: str | int) -> None:
        """A call of which the answer is lost, as behind a proxy that has none (502, 504), is made again.

        Servers make such calls one after the other, and one that has nothing to do succeeds: so when the second one is
        answered, the first is over. To ask what it is in would not tell whether that is still to change.
        """
        for number in range(1, TRIES + 1):
            try:
                answer = await self.ask("POST", path, params=query)
                if answer.status_code not in _LOST or number == TRIES:
                    _check(path, answer)
                    return
            except httpx.TimeoutException:
                raise
            except (httpx.HTTPError, OSError):
                if number == TRIES:
                    raise
            await asyncio.sleep(ASK_EVERY_S)


def _mapped_and_missing(workers: Iterable[Iterable[dict[str, Any]]]) -> tuple[int | None, int | None]:
    """Of all workers, the bytes that are mapped; and the most that any of them lacks. None if they do not say."""
    try:
        sums = [[(int(tag["bytes"]), int(tag["mapped_bytes"])) for tag in usage] for usage in workers]
    except KeyError:
        return None, None
    mapped = [sum(mapped for _, mapped in usage) for usage in sums]
    missing = [sum(total - mapped for total, mapped in usage) for usage in sums]
    return sum(mapped), max(missing)


def _kept_bytes(tag: dict[str, Any]) -> int:
    """Of a tag's memory, whatever a server says: older layers say nothing."""
    said = tag.get("kept_bytes")
    return min(said, int(tag["bytes"])) if type(said) is int and said > 0 else 0


def has_gate(command: Sequence[str], variables: Mapping[str, str]) -> bool:
    """Whether a server has the gate of this package: its command says so, or this package is installed where its vLLM
    is, which gets it then. The Rust frontend of vLLM 0.33 takes no middleware, and does not start with one.

    Args:
        variables: of its environment.
    """
    if any(GATE in word for word in command):
        return True
    if variables.get("VLLM_USE_RUST_FRONTEND", "0") != "0":
        return False
    return VllmEngine.is_started_by(command) and packages_beside(command, variables, "vllm") is not None


def _check(path: str, answer: httpx.Response) -> httpx.Response:
    if answer.status_code in (httpx.codes.NOT_FOUND, httpx.codes.METHOD_NOT_ALLOWED):
        raise Failed(_NO_SLEEP_MODE, is_unknown=True)
    if not answer.is_success:
        raise Failed(f"{path}: {answer.status_code}: {error_of(answer)}")
    return answer


def _left_out(answer: httpx.Response) -> str:
    """The weights that a reload left out, as the layer in the workers says."""
    try:
        return next((names for names in answer.json()["results"] if isinstance(names, str)), "")[:MOST_SAID]
    except (ValueError, KeyError, TypeError):
        return ""
