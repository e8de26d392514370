"""vLLM's HTTP calls for sleep mode: what is called, and what is certain when a call fails or its answer is lost."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
import ssl
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import httpx

from .address import Address
from .policy import OF_LAYER
from .status import Phase

ASK_WITHIN_S = 10.0
ASK_EVERY_S = 0.2
_RESET = "/reset_prefix_cache"
TRIES = 3
_LACKS_HOST_MEMORY = ("host memory", "outofhostmemory", "no vault answers")  # in the layer's errors
_IN_ENGINE = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{.*\})? (\S+)$", re.MULTILINE)
_NO_SLEEP_MODE = (
    "its server has no calls for sleep: it needs --enable-sleep-mode, and the gate of cumem-sleep with its api_key as"
    " CUMEM_SLEEP_ADMIN_TOKEN, or VLLM_SERVER_DEV_MODE=1"
)


@dataclass(frozen=True)
class Outcome:
    """What became of a call.

    Attributes:
        error: None if it did what it should.
        state: awake, asleep, or stopped (nobody answers there); None if nobody knows.
        level: at which it sleeps, as far as is known.
        lacks_host_memory: the server refused to sleep for want of it.
        why_not_deeper: it sleeps, but at a lesser level than was wanted.
    """

    error: str | None = None
    state: Phase | None = None
    level: int | None = None
    lacks_host_memory: bool = False
    why_not_deeper: str = ""


@dataclass(frozen=True)
class Facts:
    """What a server says of this package's layer.

    Attributes:
        layer: the version of cumem-sleep in it; "" if it is not in it, None if that is not known.
        host_bytes: what its backups take at level 1; None if that is not known.
        backed_up_bytes: of these, what they take already: they are prepared while it is awake, and kept when it wakes.
        vault: the socket of the `cumem-sleep vault` that keeps its backups; "" if its own memory does.
        mapped_bytes: of its GPUs' memory, what is mapped for weights and KV cache; None if that is not known.
        wake_bytes: what a wake maps on one of its GPUs, that where it is most; None if that is not known.
    """

    layer: str | None = None
    host_bytes: int | None = None
    backed_up_bytes: int = 0
    vault: str = ""
    mapped_bytes: int | None = None
    wake_bytes: int | None = None


class Failed(Exception):
    """A call was answered with an error.

    Attributes:
        is_unknown: the server has no such path.
    """

    def __init__(self, why: str, is_unknown: bool = False) -> None:
        super().__init__(why)
        self.is_unknown = is_unknown


class Engine:
    """One server. A call never raises: it ends in an `Outcome`.

    An error is followed by a state only if that is certain. vLLM's own layer may fail midway, and then says what is not
    so; the layer of this package does all of a sleep or wake, or nothing.

    Attributes:
        has_layer: cumem-sleep is in it, as far as is known.
        has_gate: its gate, too. Without it, in vLLM's development mode, the layer is asked by `/collective_rpc`.
        kept_bytes: of its KV cache, what it keeps in host memory while it sleeps, as it has said last.
        stops_requests: its sleep ends requests that run, as far as is known; before 0.18 vLLM pulls memory from under
            them.
    """

    def __init__(self, address: Address, within_s: float, transport: httpx.AsyncBaseTransport | None = None) -> None:
        """`within_s`: what a sleep or wake may take. `transport`: how it is reached, if not by its address."""
        if address.socket is not None:
            transport = httpx.AsyncHTTPTransport(uds=address.socket, verify=_certificates())
        self.address = address
        self.has_layer = self.has_gate = False
        self.kept_bytes = 0
        self.stops_requests = True
        self._within_s = within_s
        self._is_half_woken = False
        self._client = httpx.AsyncClient(
            transport=transport,
            base_url=address.base_url,
            headers=dict(address.control),
            timeout=within_s,
            verify=_certificates(),
            trust_env=False,  # a proxy for the world is none for this machine's servers
        )

    async def close(self) -> None:
        """Close its connections."""
        await self._client.aclose()

    async def is_healthy(self) -> bool:
        """Whether it answers `/health` with success."""
        try:
            return (await self._client.get("/health", timeout=ASK_WITHIN_S)).is_success
        except (httpx.HTTPError, OSError):
            return False

    async def look(self) -> Outcome:
        """What it is in now. A sleep of which nobody knows the level is taken for one that lost the weights."""
        if self._is_half_woken:
            woken = await self.wake(2)
            if woken.error is not None:
                return woken
        try:
            answer = await self._client.get("/is_sleeping", timeout=ASK_WITHIN_S)
            if answer.status_code == httpx.codes.NOT_FOUND:
                return Outcome(_NO_SLEEP_MODE)
            answer.raise_for_status()
            sleeps = answer.json()["is_sleeping"]
        except httpx.ConnectError as error:
            return Outcome(f"no server answers there: {error}", Phase.STOPPED)
        except (httpx.HTTPError, OSError, ValueError, KeyError, TypeError) as error:
            return Outcome(f"it does not say whether it sleeps: {_text(error)}")
        if not sleeps:
            return Outcome(None, Phase.AWAKE)
        # Its engine may take for asleep what its workers have mapped: after a wake that failed half-way, or a pause.
        if mapped := (await self.facts()).mapped_bytes if self.has_layer else 0:
            return Outcome(f"it says that it sleeps, and its workers have {mapped / (1 << 30):.1f} GiB mapped")
        return Outcome(None, Phase.ASLEEP, 2)

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
            return Outcome(f"/sleep: {_text(error)}")
        return await self._deepen() if level == OF_LAYER else Outcome(None, Phase.ASLEEP, level)

    async def _deepen(self) -> Outcome:
        """From level 1 to 3. Whatever becomes of it, the server sleeps, and is woken from either in the same way."""
        if not self.has_layer:
            return Outcome(None, Phase.ASLEEP, 1, why_not_deeper="cumem-sleep is not in its server")
        path = "/sleep" if self.has_gate else "/collective_rpc"
        try:
            if self.has_gate:
                said = _check(path, await self._client.post(path, params={"level": OF_LAYER})).json()
                level, why = int(said["level"]), str(said.get("why_not_deeper", ""))
            else:
                answer = _check(path, await self._client.post(path, json={"method": "cumem_sleep_deepen"}))
                workers = answer.json()["results"]
                why = next((str(each["why"]) for each in workers if each["why"]), "")
                level = OF_LAYER if all(each["checkpointed"] for each in workers) else 1
            return Outcome(None, Phase.ASLEEP, level, why_not_deeper=why)
        except (Failed, httpx.HTTPError, OSError, ValueError, KeyError, TypeError) as error:
            return Outcome(None, Phase.ASLEEP, 1, why_not_deeper=f"{path}: {_text(error)}")

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
            return Outcome(f"/wake_up: {_text(error)}")
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
            answer = await self._client.get("/cumem_sleep/status", timeout=ASK_WITHIN_S)
            self.has_gate = answer.status_code != httpx.codes.NOT_FOUND
            if not self.has_gate:
                body = {"method": "cumem_sleep_status"}
                answer = await self._client.post("/collective_rpc", json=body, timeout=ASK_WITHIN_S)
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
            vault = str(workers[0].get("place", {}).get("vault", ""))
            version = str(workers[0].get("version", "active"))
            self.kept_bytes = sum(_kept_bytes(tag) for worker in workers for tag in worker["usage"].values())
            mapped_bytes, wake_bytes = _mapped_and_missing(worker["usage"].values() for worker in workers)
            return Facts(version, host_bytes, backed_up_bytes, vault, mapped_bytes, wake_bytes)
        except (httpx.HTTPError, OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError):
            return Facts()

    async def give_up_kept(self) -> str:
        """Have it give up the KV cache that it keeps while it sleeps; returns why it did not, in words, or ""."""
        try:
            _check(_RESET, await self._client.post(_RESET, timeout=ASK_WITHIN_S))
        except (Failed, httpx.HTTPError, OSError) as error:
            return _text(error)
        await self.facts()
        return f"it still keeps {self.kept_bytes} bytes" if self.kept_bytes else ""

    async def learn_version(self) -> None:
        """Find out whether its sleep stops requests."""
        with contextlib.suppress(httpx.HTTPError, OSError, ValueError, KeyError, TypeError):
            answer = await self._client.get("/version", timeout=ASK_WITHIN_S)
            if numbers := re.match(r"(\d+)\.(\d+)", str(answer.json()["version"])):
                self.stops_requests = (int(numbers[1]), int(numbers[2])) >= (0, 18)

    async def _is_idle(self) -> bool:
        """Whether no request is in its engine any more, in time: it hears of clients that left only after a while.

        Without vLLM's metrics (`--disable-log-stats`) nobody can tell.
        """
        until = time.monotonic() + self._within_s
        while True:
            answer = await self._client.get("/metrics", timeout=ASK_WITHIN_S)
            if not any(float(count) for count in _IN_ENGINE.findall(answer.text)):
                return True
            if time.monotonic() >= until:
                return False
            await asyncio.sleep(ASK_EVERY_S)

    async def names(self) -> tuple[str, ...]:
        """The names that it knows its model by, adapters among them; empty if it does not say."""
        try:
            answer = await self._client.get("/v1/models", timeout=ASK_WITHIN_S)
            return tuple(str(card["id"]) for card in answer.raise_for_status().json()["data"])
        except (httpx.HTTPError, OSError, ValueError, KeyError, TypeError):
            return ()

    async def _reload(self) -> None:
        """By the path of newer servers and of this package's gate, or else by the worker's method."""
        try:
            await self._post("/reload_weights")
        except Failed as error:
            if not error.is_unknown:
                raise
            body = {"method": "reload_weights"}
            answer = _check("/collective_rpc", await self._client.post("/collective_rpc", json=body))
            if names := _left_out(answer):
                raise Failed(f"reload_weights left out weights that level 2 dropped: {names}") from None

    async def _post(self, path: str, **query: str | int) -> None:
        """A call of which the answer is lost is made again.

        Servers make such calls one after the other, and one that has nothing to do succeeds: so when the second one is
        answered, the first is over. To ask what it is in would not tell whether that is still to change.
        """
        for number in range(1, TRIES + 1):
            try:
                _check(path, await self._client.post(path, params=query))
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


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Read once: each client would otherwise read them anew, and keep them."""
    return ssl.create_default_context()


def _check(path: str, answer: httpx.Response) -> httpx.Response:
    if answer.status_code in (httpx.codes.NOT_FOUND, httpx.codes.METHOD_NOT_ALLOWED):
        raise Failed(_NO_SLEEP_MODE, is_unknown=True)
    if not answer.is_success:
        raise Failed(f"{path}: {answer.status_code}: {_said(answer)}")
    return answer


def _left_out(answer: httpx.Response) -> str:
    """The weights that a reload left out, as the layer in the workers says."""
    try:
        return next((names for names in answer.json()["results"] if isinstance(names, str)), "")
    except (ValueError, KeyError, TypeError):
        return ""


def _said(answer: httpx.Response) -> str:
    """The message of an error, in whichever shape it comes."""
    try:
        body: Any = answer.json()
    except ValueError:
        return answer.text[:500]
    found = body.get("error", body) if isinstance(body, dict) else body
    return str(found.get("message", found) if isinstance(found, dict) else found)[:500]


def _text(error: Exception) -> str:
    return f"{type(error).__name__}{f': {error}' if str(error) else ''}"
