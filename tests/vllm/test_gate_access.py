"""Who may what: the admin token and API keys."""

from __future__ import annotations

import logging

import pytest
from fake_vllm import FakeEngine, FakeVllm
from gate_client import TOKEN, Serve

pytestmark = pytest.mark.usefixtures("gate_environment")


ADMIN = ("/sleep", "/wake_up", "/wake", "/reload_weights", "/release_kv_cache_memory", "/pause", "/resume")
ADMIN += ("/collective_rpc", "/update_weights", "/start_weight_update", "/finish_weight_update", "/sleep/")
ADMIN += ("/start_draft_weight_update", "/init_weight_transfer_engine", "/update_weight_version", "/weight_checker")
ADMIN += ("/abort_requests", "/scale_elastic_ep", "/fault_tolerance/apply", "/start_profile", "/adapters")


async def test_the_admin_token_is_for_posts(serve: Serve) -> None:
    client = serve(admin_token=TOKEN)
    for method in ("OPTIONS", "HEAD", "GET"):
        assert (await client.request(method, "/sleep")).code == 200, "what vLLM makes of it"
    assert client.engine.calls == []


@pytest.mark.parametrize("path", ADMIN)
@pytest.mark.parametrize("dev_mode", ["1", "0"])
async def test_the_admin_token(serve: Serve, path: str, dev_mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", dev_mode)
    if path == "/release_kv_cache_memory":  # that needs a pause first
        monkeypatch.setattr(FakeEngine, "release_kv_cache_memory", FakeEngine.pause_generation)
    client = serve(FakeVllm(dev_mode=dev_mode == "1"), admin_token=TOKEN)
    for key in ("", "wrong", TOKEN + "x", TOKEN[:-1], "schlüssel"):
        response = await client.post(path, key=key)
        assert response.code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.error["type"] == "AuthenticationError"
        assert ("the token is wrong" if key else "is needed") in response.error["message"]
    basic = [(b"authorization", b"Basic " + TOKEN.encode())]
    assert (await client.post(path, headers=basic)).code == 401
    assert client.engine.calls == client.vllm.seen == []
    bearer = [(b"authorization", b"bearer " + TOKEN.encode())]
    assert (await client.post(path, b'{"method": "x"}', key=TOKEN)).code != 401
    assert (await client.post(path, b'{"method": "x"}', headers=bearer)).code != 401


async def test_of_an_adapter_without_the_api_key_nothing_is_read(serve: Serve) -> None:
    client = serve(FakeVllm(api_keys=("good-key",)))
    load = client.begin("POST", "/v1/load_lora_adapter", slow=True)  # its body never comes
    assert (await load.response()).code == 401
    assert client.vllm.seen == []
    assert (await client.request("POST", "/v1/load_lora_adapter", key="good-key")).code == 200


async def test_the_token_is_never_logged(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    client = serve(admin_token=TOKEN, on_request="wake")
    await client.post("/sleep", key=TOKEN)
    client.engine.fails["wake_up"] = [RuntimeError("no memory")]
    await client.ask()
    await client.post("/sleep", key=TOKEN + "x")
    assert "no memory" in caplog.text
    assert TOKEN not in caplog.text


@pytest.mark.parametrize("source", ["middleware", "arguments", "environment"])
async def test_a_request_without_the_api_key_wakes_nothing_and_is_not_held(
    serve: Serve, policy: str, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = serve(FakeVllm(api_keys=("good-key", "other-key")), on_request=policy)
    if source != "middleware":
        client.vllm.user_middleware = []
    if source == "arguments":
        client.vllm.state.args.api_key = ["good-key", "other-key"]
    if source == "environment":
        monkeypatch.setenv("VLLM_API_KEY", "other-key")
    await client.post("/sleep")
    for key in ("", "bad-key"):
        response = await client.ask(key)
        assert (response.code, response.body) == (401, {"error": "Unauthorized"}), "vLLM's own answer"
        response = await client.post("/score", key=key)  # a path that vLLM does not guard
        assert response.code == 503
    assert client.engine.count("wake_up") == client.engine.count("generate") == 0
    request = await client.under_way("/v1/completions", key="other-key")
    if policy == "wait":
        await client.post("/wake_up")
    assert (await request.response()).code == (503 if policy == "reject" else 200)


@pytest.mark.parametrize("missing", ["the engine", "the engine's name", "the state", "the app"])
async def test_routes_want_the_token_whatever_vllm_calls_its_parts(serve: Serve, missing: str) -> None:
    client = serve(admin_token=TOKEN)
    scope = {}
    if missing == "the engine":
        client.vllm.state.engine_client = None
    elif missing == "the engine's name":
        client.vllm.state.engine = vars(client.vllm.state).pop("engine_client")
    elif missing == "the state":
        del client.vllm.state
    else:
        scope = {"app": None}
    for path in (*ADMIN, "/some_future_path", "/v1/load_lora_adapter"):
        for key in ("", "wrong"):
            assert (await client.post(path, key=key, **scope)).code == 401, path
    assert (await client.request("GET", "/server_info", **scope)).code == 401
    assert client.vllm.seen == client.engine.calls == []
    assert (await client.post("/pause", key=TOKEN, **scope)).code == 200
    if missing != "the app":
        assert (await client.ask()).code == 200
        assert (await client.get("/health")).code == 200
