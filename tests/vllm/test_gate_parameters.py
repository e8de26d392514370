"""Parameters of the calls that change the sleep: in the query, in a JSON body, or wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake_vllm import TAGS, FakeEngine, FakeVllm
from gate_client import TOKEN, Serve, asleep

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


class NewerEngine(FakeEngine):
    """Calls with more parameters, a sleep that leaves the scheduler alone, and answers in objects."""

    async def pause_generation(
        self, mode: str = "abort", clear_cache: bool = True, clear_connector_cache: bool = True
    ) -> None:
        self.calls.append(("pause", mode, clear_cache, clear_connector_cache))
        self.scheduler_paused = True

    async def sleep(  # type: ignore[override]
        self, level: int = 1, tags: list[str] | None = None, clear_connector_cache: bool = True
    ) -> None:
        assert self.scheduler_paused, "requires a completed pause first"
        await self._called("sleep", level, tags, clear_connector_cache)
        if level:
            self._sleep(level)
            self.asleep &= set(tags or TAGS)

    async def wake_up(self, tags: list[str] | None = None, eager: bool | None = None) -> bool:
        is_awake = await super().wake_up(tags)
        self.calls.append(("eager", eager))
        self.scheduler_paused = True
        return is_awake

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        self.calls.append(("reset", reset_running_requests, reset_connector))
        return True

    async def is_sleeping(self) -> Any:
        return {"is_sleeping": await super().is_sleeping(), "level": 1}


class NewerVllm(FakeVllm):
    """Its routes have the parameters of its engine's calls."""

    async def _dev_route(self, path: str, query: dict[str, list[str]], body: bytes) -> tuple[int, Any]:
        given: dict[str, Any] = {
            name: values if name == "tags" else values[0] != "false" if values[0] in ("true", "false") else values[0]
            for name, values in query.items()
        }
        engine = self.engine
        if path == "/sleep":
            await engine.sleep(int(given.pop("level")), **given)
        elif path == "/wake_up":
            given.pop("restore", None)
            await engine.wake_up(**given)
        elif path == "/pause":
            await engine.pause_generation(**given)
        else:
            return await super()._dev_route(path, query, body)
        return 200, {"status": path}


@pytest.mark.parametrize("dev_mode", [True, False])
async def test_what_a_later_vllm_adds_or_moves_passes_through(
    serve: Serve, dev_mode: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1" if dev_mode else "0")
    client = serve(NewerVllm(NewerEngine(), dev_mode), admin_token=TOKEN, on_request="wake")
    calls = client.engine.calls

    client.engine.plugin = False  # whose word would count for more

    async def post(target: str, body: Any = b"") -> int:
        calls.clear()
        return (await client.post(target, content(body), key=TOKEN)).code

    assert await post("/sleep?mode=wait", {"clear_connector_cache": False}) == 200
    assert [call for call in calls if call[0] in ("pause", "sleep")] == [
        ("pause", "wait", True, True),
        ("sleep", 1, None, False),
    ]
    assert (await client.get("/is_sleeping")).body["is_sleeping"] is True
    assert await post("/wake_up?eager=1") == 200
    assert ("eager", True) in calls
    assert calls.index("resume") > calls.index(("wake_up", None))
    if not dev_mode:
        assert (await client.get("/is_sleeping")).body == {"is_sleeping": False}
    assert (await client.ask()).body == {"text": "good"}

    assert await post("/sleep", {"tags": ["kv_cache"], "level": 2}) == 200
    assert ("sleep", 2, ["kv_cache"], True) in calls
    assert client.gate.model.asleep == {"kv_cache"}
    client.engine.weights = "good"  # it sleeps by tags, and these were not among them
    client.engine.not_loaded = ""
    assert (await client.ask()).body == {"text": "good"}, "a request wakes what sleeps, and loads nothing"
    assert "reload_weights" not in calls

    assert await post("/pause?mode=keep&clear_connector_cache=0") == 200
    assert ("pause", "keep", True, False) in calls
    assert await post("/sleep?eager=1") == 400
    assert await post("/wake_up?clear_connector_cache=1") == 400
    if not dev_mode:  # else it is vLLM's own
        assert await post("/reset_prefix_cache?reset_external=true") == 200
        assert ("reset", False, True) in calls
        assert await post("/reset_prefix_cache?reset_connector=true") == 400
