"""What the gate bounds, and what it answers when something is out of bounds."""

from __future__ import annotations

import asyncio
import gc
import http.server
import threading
import urllib.error
import urllib.request
from typing import Any

import pytest
from fake_vllm import FakeEngine, FakeVllm, until_idle
from gate_client import Serve, asleep

from cumem_sleep.vllm import SleepGate
from cumem_sleep.vllm.sleeping_model import GatePhase

# Held requests


@pytest.mark.parametrize("policy", ["wait", "wake"])
async def test_no_more_requests_are_held_than_allowed(serve: Serve, policy: str) -> None:
    client = await asleep(serve, on_request=policy, max_held_requests=3)
    client.engine.waits["wake_up"] = asyncio.Event()
    held = [client.begin("POST", "/v1/completions") for _ in range(3)]
    await until_idle()
    response = await client.ask()
    assert response.code == 503
    assert "too many requests are already held" in response.error["message"]
    assert not any(each.task.done() for each in held)
    client.engine.waits["wake_up"].set()
    await client.post("/wake")
    assert [(await each.response()).code for each in held] == [200] * 3
    assert client.gate._held.requests == client.gate._held.nbytes == 0


@pytest.mark.parametrize("policy", ["wait", "wake"])
async def test_no_more_bytes_are_held_than_allowed(serve: Serve, policy: str) -> None:
    client = await asleep(serve, on_request=policy, max_held_bytes="1000")
    client.engine.waits["wake_up"] = asyncio.Event()
    small = await client.under_way("/v1/completions", b"x" * 900)
    assert client.gate._held.nbytes == 900
    large = await client.under_way("/v1/completions", b"x" * 900)
    assert large.task.done()
    assert (await large.response()).code == 503
    assert not small.task.done()
    assert client.gate._held.nbytes == 900
    client.engine.waits["wake_up"].set()
    await client.post("/wake")
    assert (await small.response()).code == 200
    assert client.gate._held.nbytes == 0


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["wait", "wake"])
async def test_a_herd_asks_the_engine_no_more_than_one(
    serve: Serve, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cumem_sleep.vllm.gate.POLL_S", 0.01)
    client = serve(on_request=policy)
    await client.engine.sleep(1)  # unseen, so that all of them ask
    client.engine.waits["wake_up"] = asyncio.Event()
    herd = [client.begin("POST", "/v1/completions") for _ in range(1000)]
    await until_idle()
    assert client.engine.count("is_sleeping") == 1
    for _ in range(5):
        await asyncio.sleep(0.01)
    assert client.engine.count("is_sleeping") == 1, "asleep it is known"
    client.engine.waits["wake_up"].set()
    if policy == "wait":
        await client.post("/wake")
    assert {(await each.response()).code for each in herd} == {200}
    assert client.engine.count("wake_up") == 1


@pytest.mark.slow
async def test_rejections_leave_nothing_behind(serve: Serve) -> None:
    client = await asleep(serve)
    for _ in range(20):
        await client.ask()
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(500):
        assert (await client.ask()).code == 503
    gc.collect()
    assert len(gc.get_objects()) - before < 100


# Changes beside a wake by request


async def test_a_pause_waits_for_a_wake_by_request(serve: Serve) -> None:
    client = serve(on_request="wake")
    client.engine.plugin = False
    await client.post("/sleep?level=2")
    client.engine.waits["reload_weights"] = asyncio.Event()
    request = await client.under_way("/v1/completions")
    pause = await client.under_way("/pause")
    assert client.engine.count("pause") == 0
    client.engine.waits["reload_weights"].set()
    assert (await pause.response()).code == 200
    await request.response()
    assert client.gate.model.asleep == set()
    assert client.gate.model.phase is GatePhase.AWAKE
    assert (await client.ask()).body == {"text": "queued"}


# Large bodies, on real sockets


class Sockets(http.server.BaseHTTPRequestHandler):
    """A server of the kind that resets a connection whose request was not read: as uvicorn does."""

    protocol_version = "HTTP/1.1"
    gate: Any
    app: Any

    def do_POST(self) -> None:
        asyncio.run(self._serve())
        self.close_connection = True

    async def _serve(self) -> None:
        left = int(self.headers["content-length"])
        headers = [(name.lower().encode(), value.encode()) for name, value in self.headers.items()]
        scope = {"type": "http", "method": "POST", "path": self.path, "query_string": b"", "headers": headers}

        async def receive() -> Any:
            nonlocal left
            body = await asyncio.to_thread(self.rfile.read, min(left, 1 << 16))
            left -= len(body)
            return {"type": "http.request", "body": body, "more_body": left > 0}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                self.send_response(message["status"])
                for name, value in message["headers"]:
                    self.send_header(name.decode(), value.decode())
                self.end_headers()
            else:
                self.wfile.write(message.get("body", b""))
                self.wfile.flush()

        await self.gate({**scope, "root_path": "", "app": self.app}, receive, send)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Not in the tests' output."""


@pytest.mark.parametrize("path", ["/v1/completions", "/sleep", "/no/such//path"])
def test_a_client_that_writes_all_before_it_reads_sees_the_answer(
    path: str, gate_environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUMEM_SLEEP_ADMIN_TOKEN", "secret")
    engine = FakeEngine()
    engine.asleep = {"weights", "kv_cache"}
    engine.scheduler_paused = True
    app = FakeVllm(engine)
    Sockets.app, Sockets.gate = app, SleepGate(app)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Sockets)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}{path}"
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(urllib.request.Request(url, data=b"x" * (24 << 20)), timeout=60)
        assert refused.value.code == {"/v1/completions": 503, "/sleep": 401}.get(path, 400)
        assert b"error" in refused.value.read()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


async def test_an_answer_does_not_wait_for_a_body_for_ever(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cumem_sleep.http.asgi.DRAIN_WITHIN_S", 0.05)
    client = await asleep(serve)
    headers = [(b"content-length", b"1000")]
    request = client.begin("POST", "/v1/completions", b"x" * 1000, slow=True, headers=headers)
    response = await request.response()
    assert response.error["code"] == 503
    assert request.cancelled_after_answers == [True], "it is sent at once, and what still comes is taken in"
