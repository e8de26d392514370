"""The HTTP gate before a stand-in for vLLM that crashes where vLLM would."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import pathlib
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from fake_vllm import TAGS, AnotherClient, Crash, FakeEngine, FakeVllm, OldEngine, until_idle
from gate_client import POLICIES, TOKEN, Serve, outcomes, run

from cumem_sleep import InvalidArgument, InvalidArgumentType
from cumem_sleep.vllm import SleepGate
from cumem_sleep.vllm.gate_settings import GateSettings
from cumem_sleep.vllm.sleeping_model import Phase

pytestmark = pytest.mark.usefixtures("gate_environment")


# Settings


def test_settings_default() -> None:
    assert GateSettings.from_environment({}) == GateSettings("reject", 60.0, 5, "auto", None)


def test_settings_come_from_the_environment() -> None:
    texts = {
        "on_request": ("wake", "wake"),
        "request_deadline_s": (" 0.5 ", 0.5),
        "retry_after_s": ("7", 7),
        "health": ("ok", "ok"),
        "admin_token": (TOKEN, TOKEN),
        "max_held_requests": ("10", 10),
        "max_held_bytes": ("1MiB", 1 << 20),
        "loading_methods": ("refit, load_it", ("refit", "load_it")),
    }
    assert {field.name for field in dataclasses.fields(GateSettings)} == set(texts)
    environment = {f"CUMEM_SLEEP_{name.upper()}": text for name, (text, _) in texts.items()}
    assert dataclasses.asdict(GateSettings.from_environment(environment)) == {
        name: value for name, (_, value) in texts.items()
    }
    assert GateSettings.__doc__ is not None
    assert all(f"{name}: " in GateSettings.__doc__ for name in texts)


@pytest.mark.parametrize(
    ("variable", "value", "allowed"),
    [
        ("ON_REQUEST", "sleep", "one of reject, wait, wake"),
        ("HEALTH", "true", "one of auto, ok, unavailable"),
        ("REQUEST_DEADLINE_S", "soon", "seconds from 0 to 86400"),
        ("REQUEST_DEADLINE_S", "-1", "seconds from 0 to 86400"),
        ("REQUEST_DEADLINE_S", "nan", "seconds from 0 to 86400"),
        ("REQUEST_DEADLINE_S", "inf", "seconds from 0 to 86400"),
        ("MAX_HELD_REQUESTS", "many", "a whole number of at least 0"),
        ("MAX_HELD_REQUESTS", "-1", "a whole number of at least 0"),
        ("MAX_HELD_BYTES", "2 barrels", "a number of bytes is allowed"),
        ("LOADING_METHODS", "refit;drop()", "names are separated by commas"),
        ("RETRY_AFTER_S", "0", "a whole number of seconds from 1 to 86400"),
        ("RETRY_AFTER_S", "1.5", "a whole number of seconds from 1 to 86400"),
        ("RETRY_AFTER_S", "1e9", "a whole number of seconds from 1 to 86400"),
    ],
)
def test_bad_values_name_variable_value_and_what_is_allowed(variable: str, value: str, allowed: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        GateSettings.from_environment({f"CUMEM_SLEEP_{variable}": value})
    assert f"CUMEM_SLEEP_{variable}=" in str(error.value)
    assert value in str(error.value)
    assert allowed in str(error.value)


@pytest.mark.parametrize(
    "values",
    [
        {"on_request": None},
        {"health": 1},
        {"retry_after_s": 1.0},
        {"retry_after_s": True},
        {"request_deadline_s": "1"},
        {"admin_token": 1},
        {"max_held_requests": 1.5},
        {"max_held_bytes": True},
        {"loading_methods": "refit"},
    ],
)
def test_wrong_types(values: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentType, match=next(iter(values))):
        GateSettings(**values)


@pytest.mark.parametrize("token", ["", " ", "two words", "tab\t", "schlüssel"])
def test_a_token_that_cannot_guard_is_an_error_that_does_not_show_it(token: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        GateSettings.from_environment({"CUMEM_SLEEP_ADMIN_TOKEN": token})
    assert "CUMEM_SLEEP_ADMIN_TOKEN" in str(error.value)
    assert not token.strip() or token not in str(error.value)


def test_bad_settings_stop_the_server_when_it_looks_the_class_up_and_when_it_makes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import cumem_sleep.vllm as package

    monkeypatch.setenv("CUMEM_SLEEP_ON_REQUEST", "nap")
    with pytest.raises(InvalidArgument, match="CUMEM_SLEEP_ON_REQUEST='nap'"):
        package.SleepGate  # noqa: B018
    with pytest.raises(InvalidArgument, match="CUMEM_SLEEP_ON_REQUEST='nap'"):
        SleepGate(FakeVllm())


@pytest.mark.slow
def test_the_gate_is_a_class_and_its_import_needs_nothing_but_the_standard_library() -> None:
    code = (
        "import sys, inspect; from cumem_sleep.vllm import SleepGate; assert inspect.isclass(SleepGate);"
        "bad = {'vllm', 'torch', 'prometheus_client', 'fastapi', 'starlette'} & set(sys.modules); assert not bad, bad"
    )
    elsewhere = pathlib.Path(__file__).parent  # not the checkout, whose package may not be built
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=elsewhere)


def test_one_line_says_the_policy_and_not_the_token(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        serve(on_request="wait", request_deadline_s=9, admin_token=TOKEN)
        assert len(caplog.records) == 1
        for part in ("wait (at most 9 s)", "/health then: 200", "admin token: needed", "open (VLLM_SERVER_DEV_MODE)"):
            assert part in caplog.text

    caplog.set_level(logging.DEBUG, "cumem_sleep")
    run(scenario())
    assert TOKEN not in caplog.text
    assert TOKEN not in repr(GateSettings(admin_token=TOKEN))


# Awake


def test_an_awake_server_is_asked_once(serve: Serve, policy: str) -> None:
    async def scenario() -> None:
        client = serve(on_request=policy)
        for _ in range(3):
            assert (await client.ask()).body == {"text": "good"}
        assert client.engine.calls == ["is_sleeping", "generate", "generate", "generate"]
        assert client.vllm.bodies == [b"{}"] * 3
        assert outcomes(client) == {}

    run(scenario())


def test_lifespan_and_servers_without_an_engine_pass(serve: Serve) -> None:
    async def scenario() -> None:
        client = serve()
        await client.gate({"type": "lifespan", "app": client.vllm}, None, None)
        await client.gate({"type": "lifespan"}, None, None)
        client.vllm.state.engine_client = None
        assert (await client.ask()).code == 200
        assert (await client.post("/sleep")).code == 200
        assert client.engine.count("is_sleeping") == 0
        assert client.vllm.seen == ["lifespan"] * 2 + ["POST /v1/completions", "POST /sleep"]

    run(scenario())


def test_a_dead_engine_answers_for_itself(serve: Serve, policy: str) -> None:
    async def scenario() -> None:
        client = serve(on_request=policy)
        client.engine.dead = True
        with pytest.raises(RuntimeError, match="EngineDeadError"):
            await client.ask()
        health = await client.get("/health")
        assert (health.code, health.body) == (503, None)

    run(scenario())


# Asleep


def test_reject(serve: Serve) -> None:
    async def scenario() -> None:
        client = serve(retry_after_s=7)
        assert (await client.post("/sleep?level=1")).code == 200
        response = await client.ask()
        assert response.code == 503
        assert response.headers["retry-after"] == "7"
        assert response.error["type"] == "ServiceUnavailableError"
        assert "asleep (level 1)" in response.error["message"]
        assert outcomes(client) == {"rejected": 1}
        await client.post("/wake_up")
        assert (await client.ask()).body == {"text": "good"}

    run(scenario())


def test_a_server_that_slept_before_the_gate_saw_it_is_found_asleep(serve: Serve) -> None:
    async def scenario() -> None:
        client = serve()
        await client.engine.sleep(2)
        response = await client.ask()
        assert response.code == 503
        assert "level 2" in response.error["message"]

    run(scenario())


def test_wait_until_awake(serve: Serve) -> None:
    async def scenario() -> None:
        client = serve(on_request="wait")
        await client.post("/sleep")
        held = [client.begin("POST", "/v1/completions", body=b'{"n": 12345}') for _ in range(3)]
        await until_idle()
        assert not any(each.task.done() for each in held)
        assert client.engine.count("wake_up") == 0
        await client.post("/wake_up")
        assert [(await each.response()).body for each in held] == [{"text": "good"}] * 3
        assert client.vllm.bodies[-3:] == [b'{"n": 12345}'] * 3
        assert outcomes(client) == {"waited": 3}

    run(scenario())


@pytest.mark.parametrize("deadline_s", [0, 0.01])
def test_wait_has_a_deadline(serve: Serve, deadline_s: float) -> None:
    async def scenario() -> None:
        client = serve(on_request="wait", request_deadline_s=deadline_s)
        await client.post("/sleep")
        response = await client.ask()
        assert response.code == 503
        assert response.headers["retry-after"] == "5"
        assert "asleep" in response.error["message"]
        assert outcomes(client) == {"timed_out": 1}

    run(scenario())


def test_wake_has_a_deadline_and_the_wake_goes_on(serve: Serve) -> None:
    async def scenario() -> None:
        client = serve(on_request="wake", request_deadline_s=0.01)
        await client.post("/sleep")
        client.engine.waits["wake_up"] = asyncio.Event()
        assert (await client.ask()).code == 503
        assert outcomes(client) == {"timed_out": 1}
        client.engine.waits["wake_up"].set()
        await until_idle()
        assert (await client.ask()).body == {"text": "good"}
        assert client.engine.count("wake_up") == 1

    run(scenario())


def test_wake_once_for_all(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        client = serve(on_request="wake")
        await client.post("/sleep")
        client.engine.waits["wake_up"] = asyncio.Event()
        held = [client.begin("POST", "/v1/completions") for _ in range(5)]
        await until_idle()
        assert client.engine.calls[-1] == ("wake_up", None)
        assert not any(each.task.done() for each in held)
        client.engine.waits["wake_up"].set()
        assert [(await each.response()).body for each in held] == [{"text": "good"}] * 5
        assert client.engine.count("wake_up") == 1
        assert outcomes(client) == {"woke": 5}

    caplog.set_level(logging.INFO, "cumem_sleep")
    run(scenario())
    assert sum("woke on request in" in record.message for record in caplog.records) == 1
    assert len(caplog.records) == 2  # that, and the gate's first


def test_wake_from_level_0(serve: Serve) -> None:
    async def scenario() -> None:
        client = serve(on_request="wake")
        await client.post("/sleep?level=0")
        assert client.gate.model.phase is Phase.ASLEEP
        assert (await client.ask()).body == {"text": "good"}
        assert ("wake_up", ["scheduling"]) in client.engine.calls

    run(scenario())


def test_level_0_counts_as_asleep(serve: Serve) -> None:
    async def scenario() -> None:
        client = serve()
        await client.post("/sleep?level=0")
        assert "level 0" in (await client.ask()).error["message"]
        await client.post("/wake_up?tags=scheduling")
        assert (await client.ask()).code == 200
        await client.engine.pause_generation()
        await client.post("/sleep?level=deep")
        assert (await client.ask()).body == {"text": "queued"}, "the level ended with the sleep"

    run(scenario())


@pytest.mark.parametrize("seen", [True, False])
def test_wake_from_level_2_loads_the_weights(serve: Serve, seen: bool) -> None:
    async def scenario() -> None:
        client = serve(on_request="wake")
        await (client.post("/sleep?level=2") if seen else client.engine.sleep(2))
        before = len(client.engine.calls)
        assert (await client.ask()).body == {"text": "good"}
        calls = [call for call in client.engine.calls[before:] if call not in ("is_sleeping", "cumem_sleep_status")]
        assert calls == [("wake_up", ["weights"]), "reload_weights", ("wake_up", ["kv_cache"]), "generate"]

    run(scenario())


def test_a_failed_wake_fails_all_who_waited_and_is_tried_again_later(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        client = serve(on_request="wake", retry_after_s=30)
        now = 1000.0
        client.gate.model.clock = lambda: now
        await client.post("/sleep")
        client.engine.fails["wake_up"] = [RuntimeError("OutOfDeviceMemory: needed 61 GiB")]
        client.engine.waits["wake_up"] = asyncio.Event()
        held = [client.begin("POST", "/v1/completions") for _ in range(3)]
        await until_idle()
        client.engine.waits["wake_up"].set()
        for each in held:
            response = await each.response()
            assert response.code == 503
            assert "waking it failed: OutOfDeviceMemory: needed 61 GiB" in response.error["message"]
            assert response.headers["retry-after"] == "30"
        now += 28.5
        response = await client.ask()
        assert response.headers["retry-after"] == "2"
        assert "needed 61 GiB" in response.error["message"]
        assert client.engine.count("wake_up") == 1
        now += 1.5
        assert (await client.ask()).body == {"text": "good"}
        assert client.engine.count("wake_up") == 2
        assert outcomes(client) == {"rejected": 4, "woke": 1}
        assert sum("waking on request failed" in record.message for record in caplog.records) == 1
        await client.post("/sleep")
        client.engine.fails["wake_up"] = [RuntimeError("again")]
        assert (await client.ask()).code == 503
        await client.post("/wake_up")
        await client.post("/sleep")
        assert (await client.ask()).code == 200, "an old failure says nothing about the next sleep"

    run(scenario())


def test_a_failed_reload_is_tried_again_where_it_stopped(serve: Serve) -> None:
    async def scenario() -> None:
        client = serve(on_request="wake", retry_after_s=1)
        now = 0.0
        client.gate.model.clock = lambda: now
        await client.post("/sleep?level=2")
        client.engine.fails["reload_weights"] = [RuntimeError("no such file")]
        assert "no such file" in (await client.ask()).error["message"]
        now += 2
        before = len(client.engine.calls)
        assert (await client.ask()).body == {"text": "good"}
        calls = [call for call in client.engine.calls[before:] if call not in ("is_sleeping", "cumem_sleep_status")]
        assert calls == ["reload_weights", ("wake_up", ["kv_cache"]), "generate"]

    run(scenario())


def test_a_failed_reload_is_tried_again_also_when_nothing_sleeps_any_more(serve: Serve) -> None:
    async def scenario() -> None:
        client = serve(on_request="wake", retry_after_s=1)
        now = 0.0
        client.gate.model.clock = lambda: now
        await client.post("/sleep?level=2")
        await client.post("/wake_up?tags=kv_cache")
        client.engine.fails["reload_weights"] = [RuntimeError("no such file")]
        assert "no such file" in (await client.ask()).error["message"]
        assert client.engine.asleep == set()
        assert (await client.ask()).code == 503
        now += 2
        assert (await client.ask()).body == {"text": "good"}

    run(scenario())


def test_a_wake_after_which_it_still_sleeps_is_a_failure(serve: Serve) -> None:
    async def scenario() -> None:
        client = serve(on_request="wake")
        await client.post("/sleep")

        async def does_nothing(tags: Any) -> None:
            client.engine.calls.append("nothing")

        client.engine.wake_up = does_nothing  # type: ignore[method-assign, assignment]
        assert "sleeps still" in (await client.ask()).error["message"]
        assert client.engine.calls.count("nothing") == 1

    run(scenario())


def test_reading_ahead_is_never_cancelled_before_the_request_ends(serve: Serve) -> None:
    """A server may lose the message that it was about to give when its `receive` is cancelled."""

    async def scenario() -> None:
        client = serve(on_request="wake")
        await client.post("/sleep")
        held = client.begin("POST", "/v1/completions")
        assert (await held.response()).body == {"text": "good"}
        assert False not in held.cancelled_after_answers

    run(scenario())


@pytest.mark.parametrize("policy", ["wait", "wake"])
def test_a_client_that_leaves_is_let_go_of(serve: Serve, policy: str) -> None:
    async def scenario() -> None:
        client = serve(on_request=policy)
        await client.post("/sleep")
        client.engine.waits["wake_up"] = asyncio.Event()
        leaves, stays = client.begin("POST", "/v1/completions"), client.begin("POST", "/v1/completions")
        await until_idle()
        leaves.leave()
        await leaves.response()
        assert leaves.sent == []
        assert not stays.task.done()
        client.engine.waits["wake_up"].set()
        if policy == "wait":
            await client.post("/wake_up")
        assert (await stays.response()).body == {"text": "good"}
        assert client.engine.count("wake_up") == 1
        assert client.engine.count("generate") == 1

    run(scenario())


def test_the_only_client_leaves_and_the_wake_goes_on(serve: Serve) -> None:
    async def scenario() -> None:
        client = serve(on_request="wake")
        await client.post("/sleep")
        client.engine.waits["wake_up"] = asyncio.Event()
        held = client.begin("POST", "/v1/completions")
        await until_idle()
        held.leave()
        await held.response()
        client.engine.waits["wake_up"].set()
        await until_idle()
        assert client.gate.model.phase is Phase.AWAKE

    run(scenario())


def test_a_held_body_is_not_read_ahead_without_limit(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        client = serve(on_request="wait")
        await client.post("/sleep")
        held = client.begin("POST", "/v1/completions", body=b"x" * 64)
        await until_idle()
        assert held._incoming.qsize() == 1, "half of it stays where it is"
        await client.post("/wake_up")
        assert (await held.response()).code == 200
        assert client.vllm.bodies[-1] == b"x" * 64

    monkeypatch.setattr("cumem_sleep.vllm.asgi.READ_AHEAD_BYTES", 32)
    run(scenario())


# While it changes


def test_requests_during_a_sleep(serve: Serve, policy: str) -> None:
    async def scenario() -> None:
        client = serve(on_request=policy)
        await client.ask()
        client.engine.waits["sleep"] = asyncio.Event()
        sleep = client.begin("POST", "/sleep")
        await until_idle()
        assert sleep.sent == []
        request = client.begin("POST", "/v1/completions")
        await until_idle()
        assert request.task.done() == (policy == "reject")
        assert client.engine.count("wake_up") == 0
        client.engine.waits["sleep"].set()
        assert (await sleep.response()).code == 200
        if policy == "wait":
            await client.post("/wake_up")
        response = await request.response()
        assert response.code == (503 if policy == "reject" else 200)
        assert client.engine.count("wake_up") == (0 if policy == "reject" else 1)

    run(scenario())


def test_requests_during_a_wake(serve: Serve, policy: str) -> None:
    async def scenario() -> None:
        client = serve(on_request=policy)
        await client.post("/sleep")
        client.engine.waits["wake_up"] = asyncio.Event()
        wake = client.begin("POST", "/wake_up")
        await until_idle()
        request = client.begin("POST", "/v1/completions")
        await until_idle()
        assert request.task.done() == (policy == "reject")
        assert (await client.get("/health")).body["status"] == "changing"
        client.engine.waits["wake_up"].set()
        await wake.response()
        assert (await request.response()).code == (503 if policy == "reject" else 200)
        assert client.engine.count("wake_up") == 1

    run(scenario())


def test_the_answer_to_a_change_comes_when_the_next_request_may(serve: Serve) -> None:
    async def scenario() -> None:
        client = serve()
        await client.post("/sleep")
        client.engine.waits["is_sleeping"] = asyncio.Event()
        wake = client.begin("POST", "/wake_up")
        await until_idle()
        assert client.engine.count("wake_up") == 1
        assert wake.sent == []
        client.engine.waits["is_sleeping"].set()
        await wake.response()
        assert (await client.ask()).code == 200

    run(scenario())


def test_changes_pass_one_after_the_other_and_asking_twice_is_harmless(serve: Serve) -> None:
    async def scenario() -> None:
        client = serve()
        client.engine.waits["sleep"] = asyncio.Event()
        first, second = client.begin("POST", "/sleep"), client.begin("POST", "/sleep")
        wake = client.begin("POST", "/wake_up")
        await until_idle()
        assert (client.engine.count("sleep"), client.engine.count("wake_up")) == (1, 0)
        client.engine.waits["sleep"].set()
        assert [(await each.response()).code for each in (first, second, wake)] == [200] * 3
        assert (client.engine.count("sleep"), client.engine.count("wake_up")) == (2, 1)
        assert (await client.post("/wake_up")).code == 200
        assert (await client.ask()).code == 200

    run(scenario())


def test_waking_what_is_awake_disturbs_nobody(serve: Serve) -> None:
    async def scenario() -> None:
        client = serve()
        await client.ask()
        client.engine.waits["wake_up"] = asyncio.Event()
        wake = client.begin("POST", "/wake_up")
        await until_idle()
        assert (await client.ask()).code == 200
        client.engine.waits["wake_up"].set()
        await wake.response()

    run(scenario())


def test_a_sleep_between_the_wake_and_the_request_holds_the_request_again(serve: Serve) -> None:
    async def scenario() -> None:
        client = serve(on_request="wait")
        await client.post("/sleep")
        request = client.begin("POST", "/v1/completions")
        await until_idle()
        client.engine.waits["is_sleeping"] = asyncio.Event()
        wake, sleep = client.begin("POST", "/wake_up"), client.begin("POST", "/sleep")
        await until_idle()
        client.engine.waits["is_sleeping"].set()
        await wake.response()
        await sleep.response()
        await until_idle()
        assert client.engine.asleep
        assert not request.task.done()
        await client.post("/wake_up")
        assert (await request.response()).body == {"text": "good"}

    run(scenario())


def test_an_answer_from_before_a_change_is_not_believed(serve: Serve) -> None:
    async def scenario() -> None:
        client = serve()
        engine = client.engine
        engine.waits["is_sleeping"] = asyncio.Event()
        answers = iter((False, True, True, True))

        async def is_sleeping() -> bool:
            answer = next(answers)
            await engine.waits["is_sleeping"].wait()
            return answer

        engine.is_sleeping = is_sleeping  # type: ignore[method-assign]
        request = client.begin("POST", "/v1/completions")
        await until_idle()  # it asked, and will hear that nothing sleeps
        async with client.gate.model.change():
            await engine.sleep(1)
            engine.waits["is_sleeping"].set()
            await until_idle()
            assert client.gate.model.phase is Phase.CHANGING
        assert (await request.response()).code == 503

    run(scenario())


def test_running_requests_are_waited_for_where_vllm_does_not(serve: Serve) -> None:
    async def scenario() -> None:
        client = serve(FakeVllm(OldEngine()))
        client.engine.waits["generate"] = asyncio.Event()
        request = client.begin("POST", "/v1/completions")
        await until_idle()
        sleep = client.begin("POST", "/sleep")
        await until_idle()
        assert client.engine.count("sleep") == 0
        assert (await client.ask()).code == 503
        client.engine.waits["generate"].set()
        assert (await request.response()).code == 200
        assert (await sleep.response()).code == 200
        assert client.engine.asleep

    run(scenario())


def test_running_requests_are_vllms_where_it_has_modes_of_sleep(serve: Serve) -> None:
    async def scenario() -> None:
        client = serve()
        client.engine.waits["generate"] = asyncio.Event()
        request = client.begin("POST", "/v1/completions")
        await until_idle()
        await client.post("/sleep?level=0&mode=keep")
        assert ("sleep", 0, "keep") in client.engine.calls
        client.engine.waits["generate"].set()
        await request.response()

    run(scenario())


# Failures


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleep_that_failed_after_the_scheduler_stopped_is_level_0(serve: Serve, level: int) -> None:
    async def scenario() -> None:
        client = serve()
        client.engine.fails["sleep"] = [RuntimeError("OutOfHostMemory")]
        with pytest.raises(RuntimeError, match="OutOfHostMemory"):
            await client.post(f"/sleep?level={level}")
        response = await client.ask()
        assert response.code == 503, "vLLM would queue it, and nobody would ever resume"
        assert "level 0" in response.error["message"]
        await client.post("/wake_up")
        assert (await client.ask()).body == {"text": "good"}

    run(scenario())


class TornEngine(FakeEngine):
    """The sleep fails in the second worker, after the first one slept, which the executor does not notice."""

    def __init__(self) -> None:
        super().__init__()
        self.first_sleeps = self.lost = False

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        assert not self.first_sleeps, "level 2 reads buffers"
        self.scheduler_paused = True
        self.first_sleeps, self.lost = True, level == 2
        self.weights = "garbage" if self.lost else self.weights
        raise RuntimeError("OutOfHostMemory")

    def status(self, rank: int) -> dict[str, Any]:
        self.asleep, self.backed_up = set(TAGS) if self.first_sleeps and rank == 0 else set(), not self.lost
        try:
            return super().status(rank)
        finally:
            self.asleep = set()

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        await super().wake_up(tags)
        if self.first_sleeps and not self.scheduler_paused:
            raise Crash("scheduler resumed on unmapped memory")
        return True

    async def collective_rpc(self, method: str, *arguments: Any, **keywords: Any) -> list[Any]:
        answer = await super().collective_rpc(method, *arguments, **keywords)
        if method == "wake_up":
            self.first_sleeps = False
        return answer

    async def generate(self) -> str:
        if self.first_sleeps:
            raise Crash("a request ran on unmapped memory")
        return await super().generate()


class OldTornEngine(TornEngine, OldEngine):
    """The same in vLLM 0.14, whose scheduler goes on."""

    async def sleep(self, level: int = 1) -> None:  # type: ignore[override]
        try:
            await TornEngine.sleep(self, level)
        finally:
            self.scheduler_paused = False


@pytest.mark.parametrize("mends", [True, False])
@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("engine", [TornEngine, OldTornEngine])
def test_a_sleep_that_failed_in_one_of_two_workers(
    serve: Serve, policy: str, engine: type[TornEngine], level: int, mends: bool
) -> None:
    async def scenario() -> None:
        client = serve(FakeVllm(engine()), on_request=policy)
        if not mends:
            client.engine.fails["wake_up"] = [RuntimeError("OutOfDeviceMemory")]
        with pytest.raises(RuntimeError, match="OutOfHostMemory"):
            await client.post(f"/sleep?level={level}")
        if policy != "wake":
            health = await client.get("/health")
            assert mends or health.code == (503 if policy == "reject" else 200)
            await client.post("/wake_up")
            if level == 2:
                await client.post("/reload_weights")
        assert (await client.ask()).body == {"text": "good"}

    run(scenario())


def test_a_sleep_that_failed_during_a_pause_leaves_the_pause(serve: Serve, policy: str) -> None:
    async def scenario() -> None:
        client = serve(on_request=policy)
        await client.post("/pause")
        client.engine.fails["sleep"] = [RuntimeError("OutOfHostMemory")]
        with pytest.raises(RuntimeError, match="OutOfHostMemory"):
            await client.post("/sleep")
        assert (await client.ask()).body == {"text": "queued"}
        assert client.engine.count("wake_up") == 0

    run(scenario())


@pytest.mark.parametrize("level", ["1.0", "%202", "+1"])
def test_a_level_as_vllm_reads_it(serve: Serve, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM 0.33 leaves it to pydantic."""
    dev_route = FakeVllm._dev_route

    async def lenient(vllm: FakeVllm, path: str, query: dict[str, list[str]], body: bytes) -> tuple[int, Any]:
        if "level" in query:
            query = {**query, "level": [str(int(float(query["level"][0])))]}
        return await dev_route(vllm, path, query, body)

    monkeypatch.setattr(FakeVllm, "_dev_route", lenient)

    async def scenario() -> None:
        client = serve()
        assert (await client.post(f"/sleep?level={level}")).code == 200
        assert (await client.ask()).code == 503

    run(scenario())


@pytest.mark.parametrize("plugin", [True, False])
def test_a_wake_of_a_tag_without_a_name_wakes_nothing(serve: Serve, plugin: bool) -> None:
    async def scenario() -> None:
        client = serve()
        client.engine.plugin = plugin
        await client.post("/sleep")
        await client.post("/wake_up?tags=")
        assert (await client.ask()).code == 503, "vLLM ignores the call"

    run(scenario())


def test_a_refused_sleep_changes_nothing(serve: Serve) -> None:
    async def scenario() -> None:
        client = serve()
        assert (await client.post("/sleep?level=deep")).code == 400
        assert (await client.ask()).code == 200
        await client.engine.pause_generation()
        assert (await client.post("/sleep?level=deep")).code == 400
        assert (await client.ask()).body == {"text": "queued"}

    run(scenario())


def test_after_a_failed_wake_the_engine_is_asked(serve: Serve) -> None:
    async def scenario() -> None:
        client = serve()
        await client.post("/sleep")
        client.engine.fails["wake_up"] = [RuntimeError("no memory")]
        with pytest.raises(RuntimeError, match="no memory"):
            await client.post("/wake_up")
        assert (await client.ask()).code == 503
        await client.engine.wake_up()  # unseen, but after a failure nothing is taken for granted
        client.engine.fails["wake_up"] = [RuntimeError("no memory")]
        with pytest.raises(RuntimeError, match="no memory"):
            await client.post("/wake_up")
        assert (await client.ask()).code == 200

    run(scenario())


def test_an_engine_that_does_not_say_what_it_does_is_asked_by_the_next_request(serve: Serve) -> None:
    async def scenario() -> None:
        client = serve()
        await client.ask()
        client.engine.fails["is_sleeping"] = [RuntimeError("busy")]
        assert (await client.post("/sleep")).code == 200
        assert client.gate.model.phase is Phase.UNKNOWN
        assert (await client.ask()).code == 503

    run(scenario())


def test_an_engine_that_does_not_answer_is_vllms_to_tell(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        client = serve()
        client.engine.waits["is_sleeping"] = asyncio.Event()
        assert (await client.ask()).code == 200

    monkeypatch.setattr("cumem_sleep.vllm.sleeping_model.ASK_WITHIN_S", 0.01)
    run(scenario())


@pytest.mark.parametrize("engine", [FakeEngine, OldEngine])
def test_an_answer_to_another_question_opens_nothing(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, engine: type[FakeEngine]
) -> None:
    """After a call that failed in one worker, vLLM's executor is late by one answer in the others."""

    async def scenario() -> None:
        client = serve(FakeVllm(engine()))
        status = client.engine.status
        monkeypatch.setattr(client.engine, "status", lambda rank: status(rank) if rank == 0 else None)
        await client.post("/sleep")
        assert (await client.ask()).code == 503
        await client.post("/wake_up")
        assert (await client.ask()).body == {"text": "good"}

    run(scenario())


def test_an_engine_that_dies_while_a_request_is_held_answers_for_itself(serve: Serve) -> None:
    async def scenario() -> None:
        client = serve(on_request="wait")
        await client.post("/sleep")
        request = client.begin("POST", "/v1/completions")
        await until_idle()
        client.engine.dead = True
        with pytest.raises(RuntimeError, match="encountered an issue"):
            await client.post("/wake_up")
        with pytest.raises(RuntimeError, match="EngineDeadError"):
            await request.response()

    run(scenario())


@pytest.mark.parametrize("policy", ["wait", "wake"])
def test_an_engine_that_ends_while_the_model_sleeps_lets_its_requests_go(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """At SIGTERM vLLM ends its engine, and then waits for all requests."""
    monkeypatch.setattr("cumem_sleep.vllm.gate.POLL_S", 0.01)

    async def scenario() -> None:
        client = serve(on_request=policy)
        client.engine.waits["wake_up"] = asyncio.Event()
        await client.post("/sleep")
        request = client.begin("POST", "/v1/completions")
        await until_idle()
        client.engine.dead = True
        with pytest.raises(RuntimeError, match="EngineDeadError"):
            await asyncio.wait_for(request.task, 5)

    run(scenario())


# Partial wakes, level 2


def test_partial_wakes_leave_it_asleep(serve: Serve) -> None:
    async def scenario() -> None:
        client = serve()
        await client.post("/sleep")
        await client.post("/wake_up?tags=weights")
        assert (await client.ask()).code == 503
        await client.post("/wake_up?tags=kv_cache")
        assert (await client.ask()).code == 200

    run(scenario())


@pytest.mark.parametrize("plugin", [True, False])
def test_a_request_wakes_the_rest_after_a_partial_wake(serve: Serve, plugin: bool) -> None:
    async def scenario() -> None:
        client = serve(on_request="wake")
        client.engine.plugin = plugin
        await client.post("/sleep")
        await client.post("/wake_up?tags=kv_cache&tags=scheduling")
        await client.post("/wake_up?tags=kv_cache&tags=weights")  # vLLM ignores it: kv_cache is awake
        assert client.engine.asleep == {"weights"}
        assert (await client.ask()).body == {"text": "good"}
        assert ("wake_up", ["weights"]) in client.engine.calls

    run(scenario())


LOADS = ("/reload_weights", "/update_weights", "/finish_weight_update", "/collective_rpc")


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("plugin", [True, False])
def test_weights_lost_at_level_2_are_not_served_until_they_are_loaded(serve: Serve, load: str, plugin: bool) -> None:
    async def scenario() -> None:
        client = serve()
        client.engine.plugin = plugin
        await client.post("/sleep?level=2")
        await client.post("/wake_up")
        response = await client.ask()
        assert response.code == 503
        assert "not loaded again: POST /reload_weights" in response.error["message"]
        if plugin:
            await client.post("/collective_rpc", body=b'{"method": "cumem_sleep_status"}')
        await client.post("/sleep?level=1")
        await client.post("/wake_up")
        assert (await client.ask()).code == 503, "garbage was backed up and restored"
        assert (await client.post(load, body=b'{"method": "reload_weights"}')).code == 200
        assert (await client.ask()).body == {"text": "good"}

    run(scenario())


@pytest.mark.parametrize("policy", ["wait", "wake"])
@pytest.mark.parametrize("load", LOADS)
def test_requests_between_the_steps_of_a_level_2_wake_are_held(serve: Serve, policy: str, load: str) -> None:
    async def scenario() -> None:
        client = serve(on_request=policy)
        await client.post("/sleep?level=2")
        await client.post("/wake_up?tags=weights")
        request = client.begin("POST", "/v1/completions")
        await until_idle()
        assert client.engine.count("reload_weights") == 0, "somebody else is loading them"
        assert client.gate.model._waking is None, "nor does it try again and again"
        await client.post("/wake_up?tags=kv_cache")
        await until_idle()
        assert not request.task.done()
        assert (await client.post(load, body=b'{"method": "reload_weights"}')).code == 200
        assert (await request.response()).body == {"text": "good"}

    run(scenario())


def test_what_was_called_while_the_weights_slept_did_not_load_them(serve: Serve) -> None:
    async def scenario() -> None:
        client = serve()
        await client.post("/sleep?level=2")
        assert (await client.post("/collective_rpc", body=b'{"method": "refit"}')).code == 409
        await client.post("/wake_up")
        assert (await client.ask()).code == 503

    run(scenario())


@pytest.mark.parametrize(
    ("method", "loads"),
    [("get_rank", False), ("init_transfer", False), ("echo", False), ("refit", True), ("load_it", True)],
)
def test_worker_methods_load_only_if_they_are_known_to(serve: Serve, method: str, loads: bool) -> None:
    async def scenario() -> None:
        client = serve(loading_methods="refit,load_it")
        await client.post("/sleep?level=2")
        await client.post("/wake_up")
        assert (await client.post("/collective_rpc", body=json.dumps({"method": method}).encode())).code == 200
        assert (await client.ask()).code == (200 if loads else 503)

    run(scenario())


def test_a_sleep_after_a_wake_without_the_weights_may_be_ended_by_a_request(serve: Serve) -> None:
    async def scenario() -> None:
        client = serve(on_request="wake")
        await client.post("/sleep?level=2")
        await client.post("/wake_up")
        await client.post("/sleep?level=2")
        assert (await client.ask()).body == {"text": "good"}

    run(scenario())


def test_a_request_that_came_during_a_staged_wake_does_not_interfere(serve: Serve) -> None:
    async def scenario() -> None:
        client = serve(on_request="wake")
        await client.post("/sleep?level=2")
        client.engine.waits["wake_up"] = asyncio.Event()
        wake = client.begin("POST", "/wake_up?tags=weights")
        await until_idle()
        request = client.begin("POST", "/v1/completions")
        await until_idle()
        client.engine.waits["wake_up"].set()
        await wake.response()
        await until_idle()
        assert client.engine.count("reload_weights") == 0
        await client.post("/update_weights")
        assert (await request.response()).body == {"text": "good"}
        assert client.engine.count("reload_weights") == 0

    run(scenario())


def test_a_failed_load_does_not_open_the_gate(serve: Serve) -> None:
    async def scenario() -> None:
        client = serve()
        await client.post("/sleep?level=2")
        await client.post("/wake_up")
        client.engine.fails["reload_weights"] = [RuntimeError("no such file")]
        response = await client.post("/reload_weights")
        assert response.code == 500
        assert "no such file" in response.error["message"]
        assert (await client.ask()).code == 503

    run(scenario())


def test_sleeping_memory_that_is_put_to_sleep_again_keeps_its_level(serve: Serve) -> None:
    async def scenario() -> None:
        client = serve(on_request="wake")
        client.engine.plugin = False
        await client.post("/sleep?level=1")
        await client.post("/sleep?level=2")
        assert (await client.ask()).body == {"text": "good"}
        assert client.engine.count("reload_weights") == 0

    run(scenario())


def test_a_deeper_sleep_after_level_0(serve: Serve) -> None:
    async def scenario() -> None:
        client = serve(on_request="wake")
        client.engine.plugin = False
        await client.post("/sleep?level=0")
        await client.post("/sleep?level=2")
        assert (await client.ask()).body == {"text": "good"}
        assert client.engine.count("reload_weights") == 1

    run(scenario())


def test_a_sleep_while_only_the_kv_cache_sleeps(serve: Serve) -> None:
    async def scenario() -> None:
        client = serve(on_request="wake")
        client.engine.plugin = False
        await client.post("/sleep?level=1")
        await client.post("/wake_up?tags=weights")
        await client.post("/sleep?level=2")  # 0.33 sleeps again; older ones let it lie
        assert (await client.ask()).body == {"text": "good"}
        assert client.engine.count("reload_weights") == 1

    run(scenario())


@pytest.mark.parametrize("plugin", [True, False])
def test_level_0_of_a_vllm_without_modes_drops_the_weights(serve: Serve, plugin: bool) -> None:
    async def scenario() -> None:
        client = serve(FakeVllm(OldEngine()), on_request="wake")
        client.engine.plugin = plugin
        await client.post("/sleep?level=0")
        assert (await client.ask()).body == {"text": "good"}
        assert client.engine.count("reload_weights") == 1

    run(scenario())


# Pauses


@pytest.mark.parametrize("plugin", [True, False])
def test_a_pause_is_no_sleep(serve: Serve, policy: str, plugin: bool) -> None:
    async def scenario() -> None:
        client = serve(on_request=policy)
        client.engine.plugin = plugin
        await client.engine.pause_generation()  # before the gate's first request, so it has to ask
        assert (await client.ask()).body == {"text": "queued"}
        assert client.engine.count("wake_up") == 0

    run(scenario())


@pytest.mark.parametrize("plugin", [True, False])
def test_a_request_does_not_end_a_pause(serve: Serve, plugin: bool) -> None:
    async def scenario() -> None:
        client = serve(on_request="wake", request_deadline_s=0.01)
        client.engine.plugin = plugin
        await client.post("/pause")
        assert (await client.ask()).body == {"text": "queued"}
        assert (await client.post("/release_kv_cache_memory")).code == 200
        assert (await client.ask()).code == 503
        assert client.engine.count("wake_up") == 0
        assert client.engine.scheduler_paused
        await client.post("/wake_up?tags=kv_cache")
        assert (await client.ask()).body == {"text": "good"}
        await client.post("/sleep")
        assert (await client.ask()).body == {"text": "good"}, "the pause is over"

    run(scenario())


def test_resume(serve: Serve, policy: str) -> None:
    async def scenario() -> None:
        client = serve(on_request=policy, request_deadline_s=0)
        for change in ("/sleep?level=1", "/wake_up?tags=weights"):
            await client.post(change)
            response = await client.post("/resume")
            assert response.code == 409
            assert "POST /wake_up" in response.error["message"]
        assert client.engine.count("resume") == 0
        await client.post("/wake_up")
        await client.post("/sleep?level=0")
        assert (await client.post("/resume")).code == 200
        assert (await client.ask()).body == {"text": "good"}
        await client.post("/pause")
        assert (await client.post("/resume")).code == 200
        assert (await client.ask()).body == {"text": "good"}

    run(scenario())


def test_resume_waits_for_a_sleep_under_way(serve: Serve) -> None:
    async def scenario() -> None:
        client = serve()
        client.engine.waits["sleep"] = asyncio.Event()
        sleep, resume = client.begin("POST", "/sleep"), client.begin("POST", "/resume")
        await until_idle()
        client.engine.waits["sleep"].set()
        await sleep.response()
        assert (await resume.response()).code == 409

    run(scenario())


def test_without_the_plugin_an_unseen_sleep_shows_where_the_scheduler_is_not_paused(serve: Serve) -> None:
    async def scenario() -> None:
        client = serve(FakeVllm(OldEngine()))
        client.engine.plugin = False
        await client.engine.sleep(1)
        assert (await client.ask()).code == 503
        assert client.gate.model.asleep == {"weights", "kv_cache"}

    run(scenario())


# /wake, /reload_weights, writes


@pytest.mark.parametrize("path", ["/wake", "/wake/", "/wake_up"])
def test_wake_is_wake_up(serve: Serve, path: str) -> None:
    async def scenario() -> None:
        client = serve()
        await client.post("/sleep")
        response = await client.post(f"{path}?tags=weights")
        assert response.body == {"status": "/wake_up"}, "vLLM's own answer"
        assert ("wake_up", ["weights"]) in client.engine.calls
        await client.post(f"{path}?tags=kv_cache", root_path="/proxy", path=f"/proxy{path}")
        assert (await client.ask()).code == 200

    run(scenario())


WRITES = (
    "/reload_weights",
    "/weight_checker",
    "/update_weights",
    "/start_weight_update",
    "/finish_weight_update",
    "/collective_rpc",
)


@pytest.mark.parametrize("path", WRITES)
@pytest.mark.parametrize("level", [1, 2])
def test_weights_are_not_written_while_they_sleep(serve: Serve, path: str, level: int) -> None:
    async def scenario() -> None:
        client = serve()
        client.engine.waits["sleep"] = asyncio.Event()
        sleep = client.begin("POST", f"/sleep?level={level}")
        await until_idle()
        body = b'{"method": "reload_weights"}'
        early = client.begin("POST", path, body)
        await until_idle()
        client.engine.waits["sleep"].set()
        await sleep.response()
        await client.post("/wake_up?tags=kv_cache")
        for response in (await early.response(), await client.post(path, body)):
            assert response.code == 409
            assert "POST /wake_up?tags=weights first" in response.error["message"]
        await client.post("/wake_up?tags=weights")
        assert (await client.post(path, body)).code == 200
        assert client.vllm.bodies[-1] == body or path == "/reload_weights"

    run(scenario())


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"{}", b'{"method": "reload_weights"}'])
def test_collective_rpc_passes_whole(serve: Serve, body: bytes) -> None:
    async def scenario() -> None:
        client = serve()
        with contextlib.suppress(ValueError, KeyError, TypeError):  # vLLM's to answer
            await client.post("/collective_rpc", body)
        assert client.vllm.bodies == [body]

    run(scenario())


def test_nothing_is_open_without_dev_mode(serve: Serve, monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    async def scenario() -> None:
        client = serve(FakeVllm(dev_mode=False), on_request=policy)
        for path in ("/sleep", "/wake_up", "/wake", "/reload_weights", "/resume", "/collective_rpc", "/pause"):
            response = await client.post(path)
            assert (response.code, response.body) == (404, {"detail": "Not Found"})
        assert client.engine.calls == []
        assert (await client.ask()).code == 200

    monkeypatch.delenv("VLLM_SERVER_DEV_MODE")
    run(scenario())
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "0")
    run(scenario())


# Who may what


ADMIN = ("/sleep", "/wake_up", "/wake", "/reload_weights", "/release_kv_cache_memory", "/pause", "/resume")
ADMIN += ("/collective_rpc", "/update_weights", "/start_weight_update", "/finish_weight_update", "/sleep/")
ADMIN += ("/start_draft_weight_update", "/init_weight_transfer_engine", "/update_weight_version", "/weight_checker")


def test_the_admin_token_is_for_posts(serve: Serve) -> None:
    async def scenario() -> None:
        client = serve(admin_token=TOKEN)
        for method in ("OPTIONS", "HEAD", "GET"):
            assert (await client.request(method, "/sleep")).code == 200, "what vLLM makes of it"
        assert client.engine.calls == []

    run(scenario())


@pytest.mark.parametrize("path", ADMIN)
@pytest.mark.parametrize("dev_mode", ["1", "0"])
def test_the_admin_token(serve: Serve, path: str, dev_mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        client = serve(FakeVllm(dev_mode=dev_mode == "1"), admin_token=TOKEN)
        for key in ("", "wrong", TOKEN + "x", TOKEN[:-1], "schlüssel"):
            response = await client.post(path, key=key)
            assert response.code == 401
            assert response.headers["www-authenticate"] == "Bearer"
            assert response.error["type"] == "AuthenticationError"
        basic = [(b"authorization", b"Basic " + TOKEN.encode())]
        assert (await client.post(path, headers=basic)).code == 401
        assert client.engine.calls == client.vllm.seen == []
        bearer = [(b"authorization", b"bearer " + TOKEN.encode())]
        assert (await client.post(path, b'{"method": "x"}', key=TOKEN)).code != 401
        assert (await client.post(path, b'{"method": "x"}', headers=bearer)).code != 401

    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", dev_mode)
    if path == "/release_kv_cache_memory":  # that needs a pause first
        monkeypatch.setattr(FakeEngine, "release_kv_cache_memory", FakeEngine.pause_generation)
    run(scenario())


def test_the_token_is_never_logged(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        client = serve(admin_token=TOKEN, on_request="wake")
        await client.post("/sleep", key=TOKEN)
        client.engine.fails["wake_up"] = [RuntimeError("no memory")]
        await client.ask()
        await client.post("/sleep", key=TOKEN + "x")

    caplog.set_level(logging.DEBUG)
    run(scenario())
    assert "no memory" in caplog.text
    assert TOKEN not in caplog.text


@pytest.mark.parametrize("source", ["middleware", "arguments", "environment"])
def test_a_request_without_the_api_key_wakes_nothing_and_is_not_held(
    serve: Serve, policy: str, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
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
        request = client.begin("POST", "/v1/completions", key="other-key")
        await until_idle()
        if policy == "wait":
            await client.post("/wake_up")
        assert (await request.response()).code == (503 if policy == "reject" else 200)

    run(scenario())


# What is gated


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/chat/completions", "/v1/completions/", "/score", "/some_future_path", "/v1/load_lora_adapter"),
        *("/invocations", "/generate", "/inference/v1/generate", "/v2/embed", "/v1/messages"),
        "/scale_elastic_ep",
    ],
)
def test_posts_are_gated(serve: Serve, path: str) -> None:
    async def scenario() -> None:
        client = serve()
        await client.post("/sleep")
        assert (await client.post(path)).code == 503
        assert (await client.post(path, root_path="/proxy", path=f"/proxy{path}")).code == 503

    run(scenario())


@pytest.mark.parametrize(
    "target",
    [
        *("GET /v1/models", "GET /version", "GET /metrics", "GET /load", "GET /is_sleeping", "HEAD /health"),
        *("OPTIONS /v1/completions", "OPTIONS /sleep", "POST /tokenize", "POST /v1/chat/completions/render"),
        *("GET /sleep", "POST /v1/messages/count_tokens", "POST /fault_tolerance/apply"),
        *("POST /reset_prefix_cache", "POST /abort_requests", "POST /v1/responses/resp_1/cancel"),
        "POST /init_weight_transfer_engine",
    ],
)
def test_what_does_not_run_the_model_passes(serve: Serve, target: str, policy: str) -> None:
    async def scenario() -> None:
        method, path = target.split()
        client = serve(on_request=policy)
        await client.post("/sleep")
        client.engine.plugin = False
        await asyncio.gather(client.begin(method, path).task, return_exceptions=True)
        await asyncio.gather(client.begin(method, path, path=f"/p{path}", root_path="/p").task, return_exceptions=True)
        assert client.vllm.seen[-2:] == [f"{method} {path}"] * 2
        assert client.engine.asleep

    run(scenario())


@pytest.mark.parametrize("root", ["/proxy", "/proxy/"])
@pytest.mark.parametrize("strips", [True, False])
def test_root_paths_and_slashes(serve: Serve, root: str, strips: bool) -> None:
    async def scenario() -> None:
        client = serve()

        async def post(path: str) -> int:
            whole = path if strips else f"/proxy{path}"
            return (await client.post(path, root_path=root, path=whole)).code

        if root.endswith("/") and not strips:  # Starlette's router finds nothing then
            assert [await post(path) for path in ("/sleep", "/v1/completions", "/wake")] == [404] * 3
            return
        assert await post("/sleep") == 200
        assert client.gate.model.phase is Phase.ASLEEP
        assert await post("/v1/completions") == 503
        assert await post("/resume") == 409
        assert await post("/resume/") == 307
        assert await post("/wake") == 200
        assert client.vllm.seen[-1] == "POST /wake_up"
        assert await post("/v1/completions") == 200

    run(scenario())


# Websockets


def test_a_websocket_to_a_sleeping_server_is_closed(serve: Serve) -> None:
    async def scenario() -> None:
        client = serve()
        await client.post("/sleep")
        socket = client.begin("", "/v1/realtime", type="websocket")
        await socket.response()
        assert [message["type"] for message in socket.sent] == ["websocket.accept", "websocket.close"]
        assert socket.sent[-1]["code"] == 1013
        assert "asleep" in socket.sent[-1]["reason"]
        assert outcomes(client) == {"rejected": 1}

    run(scenario())


@pytest.mark.parametrize("policy", ["wait", "wake"])
def test_a_websocket_is_held(serve: Serve, policy: str) -> None:
    async def scenario() -> None:
        client = serve(on_request=policy)
        await client.post("/sleep")
        client.engine.waits["wake_up"] = asyncio.Event()
        socket, leaves = (client.begin("", "/v1/realtime", type="websocket") for _ in range(2))
        await until_idle()
        assert socket.sent == []
        leaves.leave()
        await leaves.response()
        assert leaves.sent == []
        client.engine.waits["wake_up"].set()
        if policy == "wait":
            await client.post("/wake_up")
        await socket.response()
        assert socket.sent == [{"type": "websocket.accept"}, {"type": "websocket.send", "text": "good"}]

    run(scenario())


def test_a_websocket_is_closed_at_the_deadline(serve: Serve) -> None:
    async def scenario() -> None:
        client = serve(on_request="wait", request_deadline_s=0.01)
        await client.post("/sleep")
        socket = client.begin("", "/v1/realtime", type="websocket")
        await socket.response()
        assert socket.sent[-1]["code"] == 1013

    run(scenario())


# Health


@pytest.mark.parametrize(
    ("policy", "health", "code"),
    [("reject", "auto", 503), ("wait", "auto", 200), ("wake", "auto", 200)]
    + [(policy, "ok", 200) for policy in POLICIES]
    + [(policy, "unavailable", 503) for policy in POLICIES],
)
@pytest.mark.parametrize("target", [("GET", "/health"), ("GET", "/ping"), ("POST", "/ping"), ("GET", "/health/")])
def test_health(serve: Serve, policy: str, health: str, code: int, target: tuple[str, str]) -> None:
    async def scenario() -> None:
        client = serve(on_request=policy, health=health)
        response = await client.request(*target)
        assert response.body is None or response.body == {"path": "/health/"}, "vLLM's own answer"
        for level in (0, 1, 2):
            await client.post(f"/sleep?level={level}")
            response = await client.request(*target)
            assert response.code == code
            assert response.body == {"status": "asleep", "asleep": True, "level": level}
            assert response.headers.get("retry-after") == ("5" if code == 503 else None)
            await client.post("/wake_up")
        client.engine.dead = True
        response = await client.request("GET", "/health")
        assert (response.code, response.body) == (503, None), "vLLM's own answer"

    run(scenario())


def test_health_of_a_dead_engine_that_slept(serve: Serve) -> None:
    async def scenario() -> None:
        client = serve(health="ok")
        await client.post("/sleep")
        client.engine.dead = True
        response = await client.get("/health")
        assert (response.code, response.body) == (503, None)

    run(scenario())


@pytest.mark.parametrize(("health", "code"), [("auto", 503), ("ok", 200), ("unavailable", 503)])
def test_health_without_weights(serve: Serve, health: str, code: int) -> None:
    async def scenario() -> None:
        client = serve(on_request="wake", health=health)
        await client.post("/sleep?level=2")
        await client.post("/wake_up")
        response = await client.get("/health")
        assert response.code == code
        assert response.body == {"status": "weights_missing", "asleep": False, "level": 2}

    run(scenario())


def test_health_does_not_wait_for_a_sleep(serve: Serve) -> None:
    async def scenario() -> None:
        client = serve()
        await client.ask()
        client.engine.waits["sleep"] = asyncio.Event()
        sleep = client.begin("POST", "/sleep")
        await until_idle()
        response = await client.get("/health")
        assert response.code == 503
        assert response.body["status"] == "changing"
        client.engine.waits["sleep"].set()
        await sleep.response()

    run(scenario())


def test_health_of_an_engine_that_does_not_answer_is_vllms(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        client = serve()
        client.engine.waits["is_sleeping"] = asyncio.Event()
        response = await client.get("/health")
        assert (response.code, response.body) == (200, None)

    monkeypatch.setattr("cumem_sleep.vllm.gate.HEALTH_WITHIN_S", 0.01)
    run(scenario())


# Several API servers


@pytest.mark.parametrize("where", ["arguments", "configuration"])
def test_with_several_servers_each_request_asks(serve: Serve, where: str) -> None:
    async def scenario() -> None:
        client = serve()
        if where == "arguments":
            client.vllm.state.args.api_server_count = 2
        else:
            parallel = SimpleNamespace(_api_process_count=2)
            client.vllm.state.vllm_config = SimpleNamespace(parallel_config=parallel)
            del client.vllm.state.args  # vLLM 0.11 has none
        for _ in range(2):
            assert (await client.ask()).code == 200
        await client.engine.sleep(1)  # by another server
        assert (await client.ask()).code == 503
        assert (await client.get("/health")).code == 503
        await client.engine.wake_up()
        assert (await client.ask()).code == 200
        await client.engine.pause_generation()
        assert (await client.ask()).body == {"text": "queued"}

    run(scenario())


@pytest.mark.parametrize("policy", ["wait", "wake"])
def test_with_several_servers_a_held_request_notices_what_another_does(
    serve: Serve, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        client = serve(on_request=policy)
        another = serve(FakeVllm(AnotherClient(client.engine)))
        client.vllm.state.args.api_server_count = another.vllm.state.args.api_server_count = 4
        await client.engine.sleep(2)
        request = client.begin("POST", "/v1/completions")
        if policy == "wait":
            await until_idle()
            for call in ("/wake?tags=weights", "/update_weights", "/wake?tags=kv_cache"):
                assert (await another.post(call)).code == 200
        assert (await request.response()).body == {"text": "good"}

    monkeypatch.setattr("cumem_sleep.vllm.gate.POLL_S", 0.01)
    run(scenario())


@pytest.mark.parametrize("awake_between", [True, False])
def test_with_several_servers_weights_loaded_through_another_count(serve: Serve, awake_between: bool) -> None:
    async def scenario() -> None:
        client = serve(on_request="wake")
        another = serve(FakeVllm(AnotherClient(client.engine)))
        client.vllm.state.args.api_server_count = another.vllm.state.args.api_server_count = 2
        await client.post("/sleep?level=2")
        await another.post("/wake")
        await another.post("/update_weights")
        if awake_between:
            assert (await client.ask()).body == {"text": "good"}
        await client.engine.sleep(1)
        assert (await client.ask()).body == {"text": "good"}
        assert client.engine.count("reload_weights") == 0

    run(scenario())


def test_with_several_servers_concurrent_requests_do_not_ask_without_end(serve: Serve) -> None:
    async def scenario() -> None:
        client = serve()
        client.vllm.state.args.api_server_count = 2
        responses = await asyncio.gather(*(client.ask() for _ in range(20)))
        assert {response.code for response in responses} == {200}
        assert client.engine.count("is_sleeping") == 20

    run(scenario())


# Real frameworks, where they are installed


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
        assert client.get("/health").json() == {"status": "asleep", "asleep": True, "level": 2}
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
