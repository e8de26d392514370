"""The gate under the real frameworks, where they are installed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake_vllm import FakeEngine

from cumem_sleep.vllm import SleepGate

pytestmark = pytest.mark.usefixtures("gate_environment")


@pytest.fixture
def fastapi_app() -> Any:
    fastapi = pytest.importorskip("fastapi", reason="needs FastAPI (in vLLM's environments)")
    engine = FakeEngine()
    app = fastapi.FastAPI()
    app.state.engine_client = engine

    async def sleep(level: int = 1) -> dict[str, str]:
        await engine.sleep(level)
        return {"status": "sleeping"}

    async def wake_up() -> dict[str, str]:
        await engine.wake_up()
        return {"status": "awake"}

    async def completions(body: dict[str, Any]) -> dict[str, Any]:
        return {"text": await engine.generate(), **body}

    async def realtime(websocket: Any) -> None:
        await websocket.accept()
        await websocket.send_text(await engine.generate())
        await websocket.close()

    realtime.__annotations__["websocket"] = fastapi.WebSocket
    app.get("/health")(lambda: None)
    app.post("/sleep")(sleep)
    app.post("/wake_up")(wake_up)
    app.post("/v1/completions")(completions)
    app.websocket("/v1/realtime")(realtime)
    app.add_middleware(SleepGate)
    return app


def test_under_fastapi(fastapi_app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    testclient = pytest.importorskip("starlette.testclient", reason="needs starlette's test client (httpx)")
    monkeypatch.setenv("CUMEM_SLEEP_ON_REQUEST", "wake")
    with testclient.TestClient(fastapi_app) as client:
        assert client.post("/v1/completions", json={"a": 1}).json() == {"text": "good", "a": 1}
        assert client.post("/sleep?level=2").json() == {"status": "sleeping"}
        assert client.get("/health").json()["level"] == 2
        assert client.post("/v1/completions", json={"a": 2}).json() == {"text": "good", "a": 2}
        assert client.post("/sleep").status_code == 200
        assert client.post("/wake").json() == {"status": "awake"}
        assert client.post("/sleep").status_code == 200
        with client.websocket_connect("/v1/realtime") as socket:
            assert socket.receive_text() == "good"
    assert fastapi_app.state.engine_client.count("reload_weights") == 1


def test_under_fastapi_a_websocket_sees_1013(fastapi_app: Any) -> None:
    testclient = pytest.importorskip("starlette.testclient", reason="needs starlette's test client (httpx)")
    disconnect = pytest.importorskip("starlette.websockets").WebSocketDisconnect
    with testclient.TestClient(fastapi_app) as client:
        client.post("/sleep")
        with client.websocket_connect("/v1/realtime") as socket, pytest.raises(disconnect) as closed:
            socket.receive_text()
        assert closed.value.code == 1013
        assert json.loads(client.post("/v1/completions", json={}).content)["error"]["code"] == 503
