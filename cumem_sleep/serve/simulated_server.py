"""A model server without a model, for `serve --demo` and for tests: OpenAI's paths, and the gate's for its sleep.

    python -m cumem_sleep.serve.simulated_server --port 8101 --served-model-name small

It keeps a record of every request that reached it while it slept, which must never happen.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import uvicorn

from ..http.asgi import HeldRequests, Inbox, Message, Receive, Scope, Send, header, refusal, response, text_response
from ..metrics import CONTENT_TYPE, ENGINE, Samples, escaped

MOST_BODY_BYTES = 1 << 30
PARTS = frozenset(("weights", "kv_cache"))
WORDS = (
    "This is {model}, a simulated model: no GPU is used, and nothing is thought. You asked {length} characters. The"
    " answer comes word by word, as a real one would, and while another model is asked I sleep."
)


@dataclass
class SimulatedServer:
    """The server: ASGI.

    Attributes:
        options: as `arguments` reads them.
        asleep: the parts that sleep.
        kept_bytes: of its KV cache, what a sleep at level 1 has kept.
        running: requests that it answers now.
    """

    options: argparse.Namespace
    asleep: frozenset[str] = frozenset()
    level: int = 0
    kept_bytes: int = 0
    running: int = 0
    answered: int = 0
    sleeps: int = 0
    wakes: int = 0
    resets: int = 0
    started_at: float = field(default_factory=time.monotonic)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request: ASGI."""
        if scope["type"] != "http":
            return
        inbox = Inbox(receive, HeldRequests(MOST_BODY_BYTES))
        body = await inbox.body(MOST_BODY_BYTES)
        method, path = str(scope["method"]), str(scope["path"])
        if (method, path) in _MODEL_PATHS:
            return await self._run_model(path, scope, body or b"", inbox, send)
        for message in await self._answer(method, path, scope):
            await send(message)

    # What runs the model

    async def _run_model(self, path: str, scope: Scope, body: bytes, inbox: Inbox, send: Send) -> None:
        if self.asleep:
            self._record(path)
            return await _send_all(send, refusal(500, "the engine is asleep"))
        asked = _object(body)
        name = asked.get("model", self.options.names[0])
        if name not in self.options.names and "multipart" not in header(scope, b"content-type"):
            return await _send_all(send, refusal(404, f"the model {name!r} does not exist"))
        if path == "/tokenize":
            return await _send_all(send, response(200, {"tokens": list(body[:100]), "count": len(body)}))
        self.running += 1
        gone = asyncio.ensure_future(inbox.until_gone())
        answering = asyncio.ensure_future(self._complete(path, asked, len(body), send))
        try:
            await asyncio.wait((gone, answering), return_when=asyncio.FIRST_COMPLETED)
            self.answered += answering.done()
        finally:
            self.running -= 1
            gone.cancel()
            answering.cancel()
            await asyncio.wait((gone, answering))

    async def _complete(self, path: str, asked: dict[str, Any], length: int, send: Send) -> None:
        """A completion, streamed or whole."""
        kind = "chat.completion" if "chat" in path else "text_completion"
        name = self.options.names[0]
        common = {"id": f"sim-{self.answered}", "created": int(time.time()), "model": name}
        if path == "/v1/embeddings":
            data = [{"object": "embedding", "index": 0, "embedding": [1.0, 0.0]}]
            whole = {"object": "list", "data": data, "model": name, "usage": _tokens(length, 0)}
            return await _send_all(send, response(200, whole))
        if not asked.get("stream"):
            words = [word async for word in self._words(asked, length)]
            text = "".join(words)
            choice = {"message": {"role": "assistant", "content": text}} if kind[0] == "c" else {"text": text}
            choices = [{"index": 0, **choice, "finish_reason": "stop"}]
            whole = {**common, "object": kind, "choices": choices, "usage": _tokens(length, len(words))}
            return await _send_all(send, response(200, whole))
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for word in self._words(asked, length):
            await send(_event(common, kind, word, None))
        await send(_event(common, kind, "", "stop"))
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _words(self, asked: dict[str, Any], length: int) -> AsyncIterator[str]:
        words = WORDS.format(model=self.options.names[0], length=length).split(" ")
        most = asked.get("max_tokens")
        for number in range(most if isinstance(most, int) else len(words)):
            if self.options.token_s:
                await asyncio.sleep(self.options.token_s)
            yield words[number % len(words)] + " "

    def _record(self, path: str) -> None:
        if self.options.record is not None:
            with self.options.record.open("a") as file:
                file.write(f"{self.options.names[0]} {path}\n")

    # What changes it, and looks

    async def _answer(self, method: str, path: str, scope: Scope) -> list[Message]:
        query = parse_qs(bytes(scope.get("query_string", b"")).decode("latin-1"))
        if (method, path) == ("POST", "/sleep"):
            level = int(query.get("level", ["1"])[-1])
            if level == 3 and self.asleep:
                self.level = level
                return response(200, {"level": level})
            return await self._sleep(level)
        if (method, path) == ("POST", "/wake_up"):
            return await self._wake(frozenset(query.get("tags", PARTS)))
        if (method, path) == ("POST", "/reload_weights"):
            return response(200, {})
        if (method, path) == ("POST", "/reset_prefix_cache"):
            return await self._reset()
        if (method, path) == ("GET", "/cumem_sleep/status"):
            return response(200, {"results": [{"version": "simulated", "usage": self._usage()}]})
        if (method, path) == ("GET", "/metrics"):
            return text_response(self._metrics(), CONTENT_TYPE)
        if (method, path) == ("GET", "/health"):
            ready = time.monotonic() - self.started_at >= self.options.start_s
            return response(200 if ready else 503, {})
        if (method, path) == ("GET", "/is_sleeping"):
            return response(200, {"is_sleeping": bool(self.asleep)})
        if (method, path) == ("GET", "/v1/models"):
            cards = [{"id": name, "object": "model", "owned_by": "simulated"} for name in self.options.names]
            return response(200, {"object": "list", "data": cards})
        if (method, path) == ("GET", "/version"):
            return response(200, {"version": "simulated"})
        return refusal(404, f"{method} {path} is not here")

    def _usage(self) -> dict[str, dict[str, int]]:
        options = self.options
        weights = {"bytes": options.weights_bytes, "backed_up_bytes": options.prepared_bytes, "kept_bytes": 0}
        kv_cache = {"bytes": options.keep_bytes, "backed_up_bytes": 0, "kept_bytes": self.kept_bytes}
        usage = {"weights": weights, "kv_cache": kv_cache}
        return {tag: {**of, "mapped_bytes": 0 if tag in self.asleep else of["bytes"]} for tag, of in usage.items()}

    def _metrics(self) -> str:
        """What the gate has, as far as it is simulated, and vLLM's word for it."""
        samples = Samples(ENGINE)
        samples.add("info", 1, rank="0", devices="0", simulated="true")
        samples.add("sleep_level", self.level if "weights" in self.asleep else 0, rank="0")
        for tag, usage in self._usage().items():
            of = {"rank": "0", "tag": tag}
            samples.add("memory_bytes", usage["mapped_bytes"], **of, state="mapped")
            samples.add("memory_bytes", usage["bytes"] - usage["mapped_bytes"], **of, state="asleep")
            samples.add("host_bytes", usage["backed_up_bytes"] + usage["kept_bytes"], **of)
        labels = f'model_name="{escaped(self.options.names[0])}",engine="0",sleep_state="awake"'
        said = f"# TYPE vllm:engine_sleep_state gauge\nvllm:engine_sleep_state{{{labels}}} {int(not self.asleep)}\n"
        return samples.text() + said

    async def _reset(self) -> list[Message]:
        self.resets += 1
        if self.resets <= self.options.fail_resets:
            return refusal(500, "a reset that was to fail")
        self.kept_bytes = 0
        return response(200, {"success": True})

    async def _sleep(self, level: int) -> list[Message]:
        self.sleeps += 1
        if self.sleeps <= self.options.fail_sleeps:
            return refusal(500, "a sleep that was to fail")
        self.asleep, self.level = PARTS, level  # nothing may come from here on
        await asyncio.sleep(self.options.sleep_s)
        self.kept_bytes = self.options.keep_bytes if level == 1 else 0
        return response(200, {})

    async def _wake(self, tags: frozenset[str]) -> list[Message]:
        self.wakes += 1
        await asyncio.sleep(self.options.wake_s)
        if self.wakes <= self.options.fail_wakes:
            return refusal(500, "a wake that was to fail")
        self.asleep -= tags
        self.kept_bytes *= "kv_cache" in self.asleep
        return response(200, {})


_MODEL_PATHS = {
    *(("POST", f"/v1/{path}") for path in ("completions", "chat/completions", "responses", "embeddings")),
    *(("POST", path) for path in ("/v1/audio/transcriptions", "/tokenize")),
}


def _tokens(asked: int, answered: int) -> dict[str, int]:
    return {"prompt_tokens": asked, "completion_tokens": answered, "total_tokens": asked + answered}


def _event(common: dict[str, Any], kind: str, word: str, finish_reason: str | None) -> Message:
    """One of a stream."""
    delta = {"delta": {"content": word}} if kind == "chat.completion" else {"text": word}
    event = {
        **common,
        "object": f"{kind}.chunk" if kind == "chat.completion" else kind,
        "choices": [{"index": 0, **delta, "finish_reason": finish_reason}],
    }
    data = b"data: " + json.dumps(event).encode() + b"\n\n"
    return {"type": "http.response.body", "body": data, "more_body": True}


def _object(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


async def _send_all(send: Send, answer: list[Message]) -> None:
    for message in answer:
        await send(message)


def arguments() -> argparse.ArgumentParser:
    """Reads how it behaves."""
    parser = argparse.ArgumentParser(description="A model server without a model.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--uds", help="a Unix socket instead of host and port")
    parser.add_argument("--served-model-name", nargs="+", required=True, dest="names")
    for name in ("start", "sleep", "wake", "token"):
        parser.add_argument(f"--{name}-seconds", type=float, default=0.0, dest=f"{name}_s")
    for name in ("sleeps", "wakes", "resets"):
        parser.add_argument(f"--fail-{name}", type=int, default=0, metavar="N", help="the first N fail")
    parser.add_argument("--weights-bytes", type=int, default=0, help="that its backups are said to take")
    parser.add_argument("--prepared-bytes", type=int, default=0, help="of these, those that are said to be backed up")
    parser.add_argument("--keep-bytes", type=int, default=0, help="of its KV cache, that a sleep is said to keep")
    parser.add_argument("--record", type=Path, help="requests that came while it slept are appended to this file")
    return parser


def serve(app: SimulatedServer) -> None:
    """Until SIGTERM."""
    where = {"uds": app.options.uds} if app.options.uds else {"host": app.options.host, "port": app.options.port}
    more = {"ws": "none", "lifespan": "off", "log_level": "warning", "timeout_graceful_shutdown": 1}
    uvicorn.run(app, **where, http="httptools", **more)  # type: ignore[arg-type]


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    serve(SimulatedServer(arguments().parse_known_args()[0]))  # what it does not know of vLLM's, it leaves alone
