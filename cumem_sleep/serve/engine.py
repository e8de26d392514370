"""vLLM's HTTP calls for sleep mode: what is asked, and what is true when an answer is lost."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import httpx

from .address import Address
from .status import Phase

ASK_WITHIN_S = 10.0
ASK_EVERY_S = 0.2
_NO_SLEEP_MODE = "its server has no sleep mode: it needs --enable-sleep-mode and VLLM_SERVER_DEV_MODE=1"


@dataclass(frozen=True)
class Outcome:
    """What became of a call.

    Attributes:
        error: None if it did what it should.
        state: awake, asleep, or stopped (nobody answers there); None if nobody knows.
        level: at which it sleeps, as far as is known.
        lacks_host_memory: the server refused to sleep for want of it.
    """

    error: str | None = None
    state: Phase | None = None
    level: int | None = None
    lacks_host_memory: bool = False


class Failed(Exception):
    """A call was answered with an error."""


class Engine:
    """One server. A call never raises: it ends in an `Outcome`."""

    def __init__(self, address: Address, within_s: float) -> None:
        """`within_s`: what a sleep or wake may take."""
        transport = httpx.AsyncHTTPTransport(uds=address.socket) if address.socket else None
        self._client = httpx.AsyncClient(
            transport=transport,
            base_url=address.base_url,
            headers=dict(address.headers),
            timeout=within_s,
            trust_env=False,  # a proxy for the world is none for this machine's servers
        )
        self._within_s = within_s

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
        try:
            answer = await self._client.get("/is_sleeping", timeout=ASK_WITHIN_S)
            if answer.status_code == httpx.codes.NOT_FOUND:
                return Outcome(_NO_SLEEP_MODE)
            answer.raise_for_status()
            sleeps = answer.json()["is_sleeping"]
        except httpx.ConnectError as error:
            return Outcome(f"nobody answers there: {error}", Phase.STOPPED)
        except (httpx.HTTPError, OSError, ValueError, KeyError) as error:
            return Outcome(f"it does not say whether it sleeps: {_text(error)}")
        return Outcome(None, Phase.ASLEEP, 2) if sleeps else Outcome(None, Phase.AWAKE)

    async def sleep(self, level: int, from_level: int | None = None) -> Outcome:
        """Put it to sleep, perhaps from a lesser sleep, from which it has to wake first."""
        if from_level is not None:
            woken = await self.wake(from_level)
            if woken.error is not None:
                return woken
        try:
            await self._post("/sleep", level=level)
        except Failed as error:
            found = await self._find_out(level)
            lacks = "host memory" in str(error).lower() or "OutOfHostMemory" in str(error)
            return Outcome(str(error), found.state, found.level, lacks and found.state is Phase.AWAKE)
        except (httpx.HTTPError, OSError) as error:
            return self._lost("/sleep", error, await self._find_out(level), Phase.ASLEEP)
        return Outcome(None, Phase.ASLEEP, level)

    async def wake(self, level: int) -> Outcome:
        """Wake it from this level; weights that were dropped are loaded again before the KV cache comes."""
        try:
            if level == 2:
                await self._post("/wake_up", tags="weights")
                await self._reload()
                await self._post("/wake_up", tags="kv_cache")
            else:
                await self._post("/wake_up")
        except Failed as error:
            return await self._half_woken(str(error), level)
        except (httpx.HTTPError, OSError) as error:
            if level == 2:
                return await self._half_woken(_text(error), level)
            return self._lost("/wake_up", error, await self._find_out(level), Phase.AWAKE)
        return Outcome(None, Phase.AWAKE)

    async def facts(self) -> tuple[str | None, int | None]:
        """The version of cumem-sleep in it ("" if it is not in it), and the bytes that its backups take at level 1.

        What is not known is None.
        """
        try:
            body = {"method": "cumem_sleep_status"}
            answer = await self._client.post("/collective_rpc", json=body, timeout=ASK_WITHIN_S)
            if not answer.is_success:
                return "", None
            workers = answer.json()["results"]
            usage = [tag for worker in workers for tag in worker["usage"].items()]
            nbytes = sum(int(each["bytes"]) for name, each in usage if name != "kv_cache")
            return str(workers[0].get("version", "active")), nbytes
        except (httpx.HTTPError, OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
            return None, None

    async def _reload(self) -> None:
        """By the path of newer servers and of this package's gate, or else by the worker's method."""
        answer = await self._client.post("/reload_weights")
        if answer.status_code in (httpx.codes.NOT_FOUND, httpx.codes.METHOD_NOT_ALLOWED):
            answer = await self._client.post("/collective_rpc", json={"method": "reload_weights"})
        _check("/reload_weights", answer)

    async def _post(self, path: str, **query: str | int) -> None:
        _check(path, await self._client.post(path, params=query))

    async def _half_woken(self, error: str, level: int) -> Outcome:
        """A wake in several calls that failed, or one that was refused: awake is then not to be trusted.

        vLLM says "not asleep" of a model whose weights were dropped and not loaded again, and of one whose wake failed
        midway. So such a model is put to sleep again, and that is believed.
        """
        try:
            await self._post("/sleep", level=level)
        except (Failed, httpx.HTTPError, OSError):
            found = await self._find_out(level)
            return Outcome(error, found.state if found.state is not Phase.AWAKE else None, found.level)
        found = await self._find_out(level)
        return Outcome(error, found.state if found.state is not Phase.AWAKE else None, found.level)

    def _lost(self, path: str, error: Exception, found: Outcome, wanted: Phase) -> Outcome:
        """The answer to a call was lost; what was found out afterwards counts."""
        if found.state is wanted:
            return Outcome(None, found.state, found.level)
        return Outcome(f"{path}: {_text(error)}", found.state, found.level)

    async def _find_out(self, level: int) -> Outcome:
        """What it is in, asked until it says; the level of a sleep is the one that was asked for."""
        ends_at = time.monotonic() + self._within_s
        while True:
            found = await self.look()
            if found.state is not None or time.monotonic() > ends_at:
                return Outcome(found.error, found.state, level if found.state is Phase.ASLEEP else None)
            await asyncio.sleep(ASK_EVERY_S)


def _check(path: str, answer: httpx.Response) -> None:
    if answer.status_code == httpx.codes.NOT_FOUND:
        raise Failed(_NO_SLEEP_MODE)
    if not answer.is_success:
        raise Failed(f"{path}: {answer.status_code}: {_said(answer)}")


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
