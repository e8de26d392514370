"""Parameters of the calls that change the sleep: in the query, in a JSON body, or wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from gate_client import Serve, asleep

pytestmark = pytest.mark.usefixtures("gate_environment")


def content(value: Any) -> bytes:
    return value if isinstance(value, bytes) else json.dumps(value).encode()


@pytest.mark.parametrize(
    ("target", "body"),
    [
        ("/sleep", {"level": 2, "mode": "wait"}),
        ("/sleep", {"level": "2", "mode": "wait"}),
        ("/sleep", {"level": 2.0, "mode": "wait"}),
        ("/sleep?level=2", {"mode": "wait"}),
        ("/sleep?level=2&level=2&mode=wait&mode=wait", {}),
        ("/sleep?level=%202&mode=wait", {}),
        ("/sleep?level=+2&mode=wait", {}),
        ("/sleep?level=2&mode=wait", {}),
        ("/sleep?level=2&mode=wait", b""),
        ("/sleep?level=2&mode=wait", b" \r\n"),
        ("/sleep?level=2&mode=wait", {"level": 2, "mode": "wait"}),
    ],
)
async def test_a_sleep_takes_its_parameters_from_either_place(serve: Serve, target: str, body: Any) -> None:
    client = serve()
    assert (await client.post(target, content(body))).code == 200
    assert ("sleep", 2, "wait") in client.engine.calls


@pytest.mark.parametrize("path", ["/wake_up", "/wake"])
@pytest.mark.parametrize(
    ("query", "body", "tags"),
    [
        ("", {"tags": ["weights"]}, ["weights"]),
        ("", {"tags": "weights"}, ["weights"]),
        ("?tags=weights&tags=weights", {}, ["weights"]),
        ("?tags=kv_cache&tags=weights", {"tags": ["weights", "kv_cache"]}, ["weights", "kv_cache"]),
        ("", {"tags": None}, None),
        ("", {}, None),
    ],
)
async def test_a_wake_takes_its_tags_from_either_place(
    serve: Serve, path: str, query: str, body: Any, tags: list[str] | None
) -> None:
    client = await asleep(serve)
    assert (await client.post(path + query, content(body))).code == 200
    assert ("wake_up", tags) in client.engine.calls


@pytest.mark.parametrize(
    ("target", "body", "said"),
    [
        ("/sleep?lvl=2", {}, "no parameter 'lvl': it has level and mode"),
        ("/sleep?Level=2", {}, "no parameter 'Level': it has level and mode"),
        ("/sleep", {"levle": 2}, "no parameter 'levle': it has level and mode"),
        ("/sleep?tags=weights", {}, "no parameter 'tags'"),
        ("/sleep?level=deep", {}, "level='deep': expected 0, 1, 2 or 3"),
        ("/sleep?level=0.5", {}, "level='0.5': expected 0, 1, 2 or 3"),
        ("/sleep?level=4", {}, "level='4': expected 0, 1, 2 or 3"),
        ("/sleep?level=-1", {}, "level='-1': expected 0, 1, 2 or 3"),
        ("/sleep?level=", {}, "level='': expected 0, 1, 2 or 3"),
        ("/sleep", {"level": True}, "level=True: expected 0, 1, 2 or 3"),
        ("/sleep", {"level": None}, "level=None: expected 0, 1, 2 or 3"),
        ("/sleep", {"level": {"a": 1}}, "level={'a': 1}: expected 0, 1, 2 or 3"),
        ("/sleep", b'{"level": NaN}', "level=nan: expected 0, 1, 2 or 3"),
        ("/sleep", b'{"level": 1e999}', "level=inf: expected 0, 1, 2 or 3"),
        ("/sleep", b'{"level": ' + b"1" * 400 + b"}", "expected 0, 1, 2 or 3"),
        ("/sleep?mode=nap", {}, "mode='nap': expected abort, wait or keep"),
        ("/sleep", {"mode": ["abort", "wait"]}, "mode=['abort', 'wait']: expected one value"),
        ("/sleep?level=1&level=2", {}, "level=['1', '2']: expected one value"),
        ("/sleep?level=1", {"level": 2}, "level is given twice, as 1 and as 2"),
        ("/sleep", b'{"level": 1, "level": 2}', "level is given twice, as 1 and as 2"),
        ("/sleep", b"level=2", "expected nothing or a JSON object"),
        ("/sleep", b"{", "expected nothing or a JSON object"),
        ("/sleep", b"[" * 5000, "expected nothing or a JSON object"),
        ("/sleep", [2], "expected nothing or a JSON object of its parameters, and got [2]"),
        ("/sleep", b"\xff", "expected nothing or a JSON object"),
        ("/wake_up?tag=weights", {}, "no parameter 'tag': it has tags"),
        ("/wake_up?restore=no", {}, "restore='no': expected true or false"),
        ("/wake", {"restore": 2}, "restore=2: expected true or false"),
        ("/wake_up?restore=1", {"restore": False}, "restore is given twice, as true and as false"),
        ("/sleep?restore=0", {}, "no parameter 'restore'"),
        ("/wake_up?tags=weight", {}, "tags='weight': expected one or more of weights, kv_cache, scheduling"),
        ("/wake?tags=weights,kv_cache", {}, "tags='weights,kv_cache': expected one or more of"),
        ("/wake_up?tags=", {}, "tags='': expected one or more of"),
        ("/wake_up", {"tags": []}, "tags=[]: expected one or more of"),
        ("/wake_up", {"tags": [["weights"]]}, "tags=['weights']: expected one or more of"),
        ("/wake_up", {"tags": {"weights": 1}}, "expected one or more of"),
        ("/wake_up?tags=weights", {"tags": ["kv_cache"]}, "tags is given twice, as weights and as kv_cache"),
        ("/wake_up?tags=weights", {"tags": None}, "tags is given twice"),
        ("/wake_up?level=1", {}, "no parameter 'level': it has tags"),
        ("/pause?mode=nap", {}, "mode='nap': expected abort, wait or keep"),
        ("/pause?clear_cache=maybe", {}, "clear_cache='maybe': expected true or false"),
        ("/pause?wait_for_inflight_requests=true", {}, "it has mode and clear_cache"),  # gone in vLLM 0.33
        ("/resume?tags=weights", {}, "/resume has no parameter 'tags': it has none"),
        ("/reload_weights", {"weights_path": "/other"}, "no parameter 'weights_path': it has none"),
        ("/release_kv_cache_memory?level=1", {}, "no parameter 'level': it has none"),
    ],
)
async def test_what_is_wrong_is_named_and_changes_nothing(serve: Serve, target: str, body: Any, said: str) -> None:
    client = serve()
    response = await client.post(target, content(body))
    assert response.code == 400
    assert said in response.error["message"]
    assert not {f"POST {target.partition('?')[0]}", "POST /wake_up"} & {*client.vllm.seen}
    assert (await client.ask()).body == {"text": "good"}


async def test_a_body_without_end_is_refused(serve: Serve) -> None:
    client = serve()
    assert (await client.post("/sleep", b" " * (65 << 10))).code == 413
    assert client.engine.count("sleep") == 0


@pytest.mark.parametrize(
    ("query", "body"), [("?mode=keep&clear_cache=0", b""), ("", {"mode": "keep", "clear_cache": False})]
)
async def test_a_pause_takes_vllms_parameters(serve: Serve, query: str, body: Any) -> None:
    client = serve()
    assert (await client.post("/pause" + query, content(body))).code == 200


@pytest.mark.parametrize(("query", "body"), [("?keep_kv=0", b""), ("", {"keep_kv": False})])
async def test_a_sleep_can_be_told_to_keep_no_kv_cache(serve: Serve, query: str, body: Any) -> None:
    client = serve()
    assert (await client.post("/sleep?keep_kv=1")).code == 200
    assert "cumem_sleep_keep_kv" not in client.engine.calls
    await client.post("/wake_up")
    assert (await client.post("/sleep" + query, content(body))).code == 200
    calls = [call for call in client.engine.calls if call == "cumem_sleep_keep_kv" or call[0] == "sleep"]
    assert calls == [("sleep", 1, "abort"), "cumem_sleep_keep_kv", ("sleep", 1, "abort")]


async def test_a_sleep_whose_wish_is_not_passed_on_is_no_sleep(serve: Serve) -> None:
    client = serve()
    client.engine.fails["cumem_sleep_keep_kv"] = [RuntimeError("no")]
    response = await client.post("/sleep?keep_kv=0")
    assert response.code == 500
    assert "nothing has changed: no" in str(response.body)
    assert client.engine.count("sleep") == 0
    assert (await client.ask()).body == {"text": "good"}
