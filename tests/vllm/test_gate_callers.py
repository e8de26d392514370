"""Programs that put vLLM to sleep by themselves, and know no token: their calls, replayed before the gate.

llama-swap's `cmd/vllm-wrapper`, llm-d's fast-model-actuation, AIBrix's runtime (0.8), production-stack's router.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from fake_vllm import TAGS, Client, FakeVllm
from gate_client import TOKEN, Serve, outcomes

pytestmark = pytest.mark.usefixtures("gate_environment")


class Refused(Exception):
    """What it does then: llama-swap's wrapper starts a second server, the others give up."""


async def post(client: Client, target: str, body: bytes = b"", key: str = "") -> None:
    response = await client.post(target, body, key)
    if response.code != 200:
        raise Refused(response.body)


async def wrapper_sleep(client: Client, level: int) -> None:
    await post(client, "/sleep", b'{"level":%d}' % level)


async def wrapper_serve(client: Client) -> None:
    if (await client.get("/health")).code == 200:
        await client.post("/wake_up", b"")  # whose answer it ignores
    else:
        await post(client, "/wake_up")
    if (await client.get("/health")).code != 200:
        raise Refused("vLLM health check failed after wake up")


async def fma_sleep(client: Client, _: int) -> None:
    await post(client, "/sleep")
    assert (await client.get("/is_sleeping")).body["is_sleeping"] is True


async def aibrix_sleep(client: Client, level: int) -> None:
    await post(client, "/sleep?level=0&mode=wait")
    await post(client, f"/sleep?level={level}")


async def stack_sleep(client: Client, level: int) -> None:
    await post(client, "/sleep", b'{"level": %d}' % level, TOKEN)  # which its VLLM_API_KEY is


async def wake(client: Client) -> None:
    await post(client, "/wake_up")


CALLERS: dict[str, tuple[Callable[[Client, int], Awaitable[None]], Callable[[Client], Awaitable[None]]]] = {
    "llama-swap": (wrapper_sleep, wrapper_serve),
    "FMA": (fma_sleep, wake),
    "AIBrix": (aibrix_sleep, wake),
}


@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.parametrize("level", [1, 2])
async def test_without_a_token_in_development_mode_they_sleep_and_wake(
    serve: Serve, caller: str, level: int, policy: str
) -> None:
    sleep, wake_up = CALLERS[caller]
    client = serve(on_request=policy, request_deadline_s=0.05)
    level = 1 if caller == "FMA" else level
    for _ in range(2):
        await sleep(client, level)
        assert client.engine.asleep == TAGS
        if level == 2 and policy != "wake":  # nobody loads the weights
            await client.post("/wake_up")
            assert (await client.get("/health")).body["status"] == "weights_missing"
            assert (await client.ask()).code == 503
            return
        await wake_up(client)
        assert (await client.get("/health")).code == 200
        assert (await client.ask()).body == {"text": "good"}
    assert client.engine.count("reload_weights") == (2 if level == 2 else 0)
    assert not outcomes(client), "it was awake before the request came"


async def test_a_wake_without_backups_or_by_tags_leaves_the_load_to_the_caller(serve: Serve) -> None:
    client = serve(on_request="wake")
    for target in ("/wake_up?restore=0", "/wake_up?tags=weights&tags=kv_cache"):
        await client.post("/sleep" + ("" if "restore" in target else "?level=2"))
        await post(client, target)
        assert client.engine.count("reload_weights") == 0
        client.engine.write_weights()
        await client.post("/finish_weight_update")


async def test_a_load_that_fails_is_an_error_of_the_wake_which_may_be_called_again(serve: Serve) -> None:
    client = serve(on_request="wake")
    await client.post("/sleep?level=2")
    client.engine.fails["reload_weights"] = [RuntimeError("no such file")]
    response = await client.post("/wake_up")
    assert (response.code, response.error["message"]) == (500, "/wake_up failed: no such file")
    assert (await client.post("/wake")).body == {"status": "awake", "tags": None}
    assert (await client.ask()).body == {"text": "good"}


@pytest.mark.parametrize("caller", CALLERS)
async def test_the_refusal_says_what_to_set(serve: Serve, caller: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama-swap's wrapper takes a token's 401 for a server that is not there, and starts a second one."""
    sleep, wake_up = CALLERS[caller]
    client = serve(admin_token=TOKEN)
    await client.post("/sleep", key=TOKEN)
    for call in (sleep(client, 1), wake_up(client)):
        with pytest.raises(Refused, match=r"needed, as Authorization: Bearer <CUMEM_SLEEP_ADMIN_TOKEN>.*send no token"):
            await call
    monkeypatch.delenv("VLLM_SERVER_DEV_MODE")
    monkeypatch.delenv("CUMEM_SLEEP_ADMIN_TOKEN")
    with pytest.raises(Refused, match="CUMEM_SLEEP_ADMIN_TOKEN or CUMEM_SLEEP_ADMIN, or VLLM_SERVER_DEV_MODE=1"):
        await sleep(serve(FakeVllm(dev_mode=False)), 1)
    with pytest.raises(Refused, match="only at the address that CUMEM_SLEEP_ADMIN has"):
        await sleep(serve(FakeVllm(dev_mode=False), admin="unix:/x/admin"), 1)


async def test_production_stacks_router_sends_its_api_key(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", TOKEN)
    monkeypatch.delenv("VLLM_SERVER_DEV_MODE")
    client = serve(FakeVllm(dev_mode=False, api_keys=(TOKEN,)), admin_token=TOKEN, on_request="wake")
    for level in (1, 2):
        await stack_sleep(client, level)
        assert client.engine.asleep == TAGS
        assert (await client.get("/is_sleeping")).body["is_sleeping"] is True
        await post(client, "/wake_up", key=TOKEN)
        assert (await client.ask(TOKEN)).body == {"text": "good"}


@pytest.mark.parametrize("tracks", [True, False])
async def test_vllms_load_counts_requests_that_are_held(serve: Serve, tracks: bool) -> None:
    client = serve(on_request="wait")
    client.vllm.state.enable_server_load_tracking = tracks
    client.vllm.state.server_load_metrics = 0
    await client.post("/sleep")
    held = [await client.under_way("/v1/completions") for _ in range(2)]
    adapter = await client.under_way("/v1/load_lora_adapter")  # no request, for vLLM
    assert client.vllm.state.server_load_metrics == (2 if tracks else 0)
    await post(client, "/wake_up")
    for request in (*held, adapter):
        assert (await request.response()).code == 200
    assert client.vllm.state.server_load_metrics == 0
