"""The last check before a request reaches vLLM's engine.

A request may pass the gate while the model is awake but reach the engine when it sleeps, because its body was slow or
its prompt was being tokenized. vLLM queues requests to a sleeping engine and runs them as soon as the scheduler
resumes: before the KV cache is back (0.18), or on weights that were not reloaded. So requests wait here, and a sleeping
engine has none in its queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidState
from ..http.asgi import within


@dataclass(eq=False)
class RequestLease:
    """A request that passed the gate, until its response is done.

    Attributes:
        may_wait: whether it may be held and wake the model: it has a valid API key, or vLLM has no keys.
        refusal: why it was not; the gate then answers it.
    """

    may_wait: bool = True
    refusal: Exception | None = None


LEASE: ContextVar[RequestLease | None] = ContextVar("cumem_sleep_lease", default=None)
Admit = Callable[[RequestLease], Awaitable[Callable[[], None]]]


class Admission:
    """Wraps `engine_core.add_request_async`, through which vLLM sends a request to its engine.

    `admit` returns when a request may go to the engine; it returns a function to call once the request is there.
    """

    def __init__(self, admit: Admit) -> None:
        self._admit = admit
        self._passing = self._waiting = 0
        self._empty = asyncio.Event()
        self._aborts: set[asyncio.Future[None]] = set()
        self._requests: Any = None

    def attach(self, engine: Any) -> None:
        """Wrap this engine.

        Raises:
            InvalidState: requests reach it in an unknown way, or its sleeps would pull memory from under them.
        """
        core: Any = getattr(engine, "engine_core", None)
        send = getattr(core, "add_request_async", None)
        # vLLM 0.31 or newer may lose the mode again (v#53082).
        has_mode = "mode" in inspect.signature(engine.sleep).parameters or hasattr(engine, "release_kv_cache_memory")
        if send is None or not has_mode:
            raise InvalidState("cumem-sleep's gate needs the engine of vLLM 0.18 or newer, whose sleeps have modes")
        self._requests = engine.output_processor

        async def add_request_async(*arguments: Any, **keywords: Any) -> Any:
            lease = LEASE.get() or RequestLease()
            self._waiting += 1
            try:
                arrived = await self._admit(lease)
            except BaseException as error:
                if isinstance(error, Exception):
                    lease.refusal = error
                self._forget(engine, *arguments)
                raise
            finally:
                self._waiting -= 1
            self._passing += 1  # no await since it was admitted
            try:
                return await send(*arguments, **keywords)
            finally:
                arrived()
                self._passing -= 1
                if not self._passing:
                    self._empty.set()

        core.add_request_async = add_request_async

    async def empties(self, within_s: float) -> bool:
        """Whether all admitted requests reach the engine in time, so that whatever is sent next comes after them."""
        deadline = asyncio.get_running_loop().time() + within_s
        while self._passing:
            self._empty.clear()
            left_s = deadline - asyncio.get_running_loop().time()
            try:
                await within(max(left_s, 0), self._empty.wait())
            except asyncio.TimeoutError:
                return False
        return True

    @property
    def unfinished(self) -> int:
        """How many requests vLLM's frontend knows of. Some go on after their answer; one whose client left runs until
        the frontend has told the engine to abort it.
        """
        return int(self._requests.get_num_unfinished_requests())

    @property
    def let_in(self) -> int:
        """How many of these are not waiting here."""
        return self.unfinished - self._waiting

    def _forget(self, engine: Any, *arguments: Any) -> None:
        """Remove the request from the frontend, which has registered it already and would keep it forever."""
        request_id = getattr(arguments[0], "request_id", None) if arguments else None
        if request_id is None:
            return

        async def abort() -> None:
            with contextlib.suppress(Exception):
                await engine.abort(request_id, internal=True)

        task = asyncio.ensure_future(abort())
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)
