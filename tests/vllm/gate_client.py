"""What the tests of the gate share: a gate before a fake vLLM, made with settings as keyword arguments."""

from __future__ import annotations

import asyncio
import pathlib
import tempfile
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fake_vllm import AnotherClient, Client, FakeEngine, FakeVllm

from cumem_sleep.vllm import SleepGate, metrics

Serve = Callable[..., Client]
POLICIES = ("reject", "wait", "wake")
TOKEN = "s3cret-of-the-operator"


@pytest.fixture
def gate_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where API servers of one vLLM share a file
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.setattr(metrics, "register", lambda *_: True)


@pytest.fixture
def serve(gate_environment: None, monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Makes a server with the gate before it; settings as keyword arguments. Call it inside of a running loop."""

    def make(vllm: FakeVllm | None = None, **settings: Any) -> Client:
        for name, value in settings.items():
            monkeypatch.setenv(f"CUMEM_SLEEP_{name.upper()}", str(value))
        vllm = vllm or FakeVllm()
        return Client(SleepGate(vllm), vllm)

    return make


@pytest.fixture(params=POLICIES)
def policy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def asleep(serve: Serve, level: int = 1, vllm: FakeVllm | None = None, **settings: Any) -> Client:
    """A server that the gate has put to sleep."""
    client = serve(vllm, **settings)
    await client.post(f"/sleep?level={level}")
    return client


def two_servers(serve: Serve, engine: FakeEngine | None = None, dev_mode: bool = True, **settings: Any) -> list[Client]:
    """Two API servers of one engine."""
    engine = engine or FakeEngine()
    vllms = [FakeVllm(each, dev_mode) for each in (engine, AnotherClient(engine))]
    for vllm in vllms:
        vllm.state.args.api_server_count = 2
    return [serve(vllm, **settings) for vllm in vllms]


async def two_awake(serve: Serve, engine: FakeEngine | None = None, **settings: Any) -> list[Client]:
    """Both have answered a request."""
    clients = two_servers(serve, engine, **settings)
    for client in clients:
        assert (await client.ask()).code == 200
    return clients


def run(scenario: Awaitable[None]) -> None:
    async def within() -> None:
        await asyncio.wait_for(scenario, 200)

    asyncio.run(within())


def outcomes(client: Client) -> dict[str, int]:
    return dict(client.gate._outcomes)
