"""vLLM's calls: in which order they are made, and what is certain when one fails or its answer is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx
import pytest

from cumem_sleep.serve.address import Address
from cumem_sleep.serve.engines import vllm
from cumem_sleep.serve.engines.engine import Facts
from cumem_sleep.serve.engines.vllm import VllmEngine
from cumem_sleep.serve.events import Outcome
from cumem_sleep.serve.status import Phase

Answer = httpx.Response | Exception
STATUS = "cumem_sleep/status"
DEFAULTS = {  # the gate is not there, and workers have nothing mapped, unless a test says so
    STATUS: httpx.Response(404, json={}),
    "collective_rpc": httpx.Response(
        200, json={"results": [{"usage": {"weights": {"bytes": 1, "backed_up_bytes": 1, "mapped_bytes": 0}}}]}
    ),
}


class Server:
    """Answers calls as it is told to, the last answer again and again; `called` is what was called."""

    def __init__(self, **answers: list[Answer]) -> None:
        self.answers = answers
        self.called: list[str] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        name = request.url.path.strip("/")
        query = request.url.query.decode()
        self.called.append(f"{name}?{query}" if query else name)
        answers = self.answers.get(name, [DEFAULTS.get(name, httpx.Response(200, json={}))])
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def sleeping(says: bool) -> httpx.Response:
    return httpx.Response(200, json={"is_sleeping": says})


ASLEEP, AWAKE = [sleeping(True)], [sleeping(False)]
FAILS = httpx.Response(500, json={"error": {"message": "it failed"}})
LOST = httpx.RemoteProtocolError("lost")


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "ASK_EVERY_S", 0.0)


def do(server: Server, call: Callable[[VllmEngine], object], *, has_layer: bool = True) -> Outcome:
    async def scenario() -> Outcome:
        one = VllmEngine(Address("http://m"), 1.0, httpx.MockTransport(server))
        one.has_layer = has_layer
        try:
            return await call(one)  # type: ignore[misc,no-any-return]
        finally:
            await one.close()

    return asyncio.run(scenario())


def _deepened(*whys: str) -> httpx.Response:
    return httpx.Response(200, json={"results": [{"checkpointed": not why, "why": why} for why in whys]})


WEIGHTS, KV_CACHE = "wake_up?tags=weights", "wake_up?tags=kv_cache"


@pytest.mark.parametrize(
    ("answers", "call", "becomes", "called"),
    [
        ({}, lambda one: one.sleep(1), Outcome(None, Phase.ASLEEP, 1), "sleep?level=1"),
        ({}, lambda one: one.wake(1), Outcome(None, Phase.AWAKE), "wake_up"),
        ({}, lambda one: one.wake(3), Outcome(None, Phase.AWAKE), "wake_up"),
        ({}, lambda one: one.wake(2), Outcome(None, Phase.AWAKE), f"{WEIGHTS} reload_weights {KV_CACHE}"),
        (
            {"reload_weights": [httpx.Response(404)]},  # an older server
            lambda one: one.wake(2),
            Outcome(None, Phase.AWAKE),
            f"{WEIGHTS} reload_weights collective_rpc {KV_CACHE}",
        ),
        ({}, lambda one: one.sleep(2, 1), Outcome(None, Phase.ASLEEP, 2), "wake_up sleep?level=2"),
        (
            {"collective_rpc": [_deepened("", "")]},
            lambda one: one.sleep(3),
            Outcome(None, Phase.ASLEEP, 3),
            "sleep?level=1 collective_rpc",
        ),
        (
            {"collective_rpc": [_deepened("")]},
            lambda one: one.sleep(3, 1),
            Outcome(None, Phase.ASLEEP, 3),
            "collective_rpc",
        ),
    ],
)
def test_what_is_called(
    answers: dict[str, list[Answer]], call: Callable[[VllmEngine], object], becomes: Outcome, called: str
) -> None:
    server = Server(**{name: list(each) for name, each in answers.items()})
    assert do(server, call) == becomes
    assert server.called == called.split()


def metrics_of(running: int, waiting: int = 0) -> httpx.Response:
    lines = [
        *("# TYPE vllm:num_requests_running gauge", 'vllm:num_requests_running_by_lora{model_name="m"} 7.0'),
        f'vllm:num_requests_running{{engine="0",model_name="m {{}}"}} {running:.1f}',
        f'vllm:num_requests_waiting{{engine="0",model_name="m"}} {waiting:.1f}',
    ]
    return httpx.Response(200, text="\n".join(lines) + "\n")


@pytest.mark.parametrize("version", ["0.11.2", "0.16.0", "0.17.1rc0"])
def test_a_vllm_whose_sleep_stops_no_requests_sleeps_when_it_is_idle(version: str) -> None:
    server = Server(
        version=[httpx.Response(200, json={"version": version})],
        metrics=[metrics_of(60, 3), metrics_of(0, 1), metrics_of(0)],
    )

    async def sleep(one: VllmEngine) -> Outcome:
        await one.learn_version()
        return await one.sleep(1)

    assert do(server, sleep) == Outcome(None, Phase.ASLEEP, 1)
    assert server.called == ["version", "metrics", "metrics", "metrics", "sleep?level=1"]


def test_a_vllm_that_does_not_become_idle_is_left_awake() -> None:
    server = Server(version=[httpx.Response(200, json={"version": "0.16.0"})], metrics=[metrics_of(1)])

    async def sleep(one: VllmEngine) -> Outcome:
        one._within_s = 0.0
        await one.learn_version()
        return await one.sleep(1)

    assert do(server, sleep) == Outcome("requests that were ended still run in its engine", Phase.AWAKE)
    assert "sleep?level=1" not in server.called


def test_a_reload_that_leaves_weights_out_is_none() -> None:
    left_out = httpx.Response(200, json={"results": [None, "draft.fc"]})
    server = Server(reload_weights=[httpx.Response(404)], collective_rpc=[left_out])
    outcome = do(server, lambda one: one.wake(2))
    assert "left out weights that level 2 dropped: draft.fc" in str(outcome.error)
    assert server.called == ["wake_up?tags=weights", "reload_weights", "collective_rpc"]


async def _with_gate(one: VllmEngine, *levels: int) -> Outcome:
    await one.facts()
    assert one.has_gate
    return await one.sleep(*levels)


OF_GATE = [httpx.Response(200, json={"results": [{"usage": {"weights": {"bytes": 1, "backed_up_bytes": 0}}}]})]


def test_the_gate_is_asked_for_level_3() -> None:
    deep = httpx.Response(200, json={"status": "sleeping", "level": 3})
    server = Server(**{STATUS: OF_GATE, "sleep": [httpx.Response(200), deep]}, collective_rpc=[httpx.Response(404)])
    assert do(server, lambda one: _with_gate(one, 3)) == Outcome(None, Phase.ASLEEP, 3)
    assert server.called == [STATUS, "sleep?level=1", "sleep?level=3"]
    assert do(server, lambda one: _with_gate(one, 3, 1)) == Outcome(None, Phase.ASLEEP, 3)
    assert server.called[3:] == [STATUS, "sleep?level=3"]


@pytest.mark.parametrize(
    ("of_gate", "answer", "why"),
    [
        (True, httpx.Response(200, json={"level": 1, "why_not_deeper": "no driver"}), "no driver"),
        (True, FAILS, "/sleep: 500: it failed"),
        (True, httpx.ReadTimeout("late"), "late"),
        (False, _deepened("", "one of 2 ranks"), "one of 2 ranks"),
        (False, FAILS, "it failed"),
        (False, httpx.Response(404), "/collective_rpc"),
        (False, httpx.Response(200, json={"results": [{}]}), "/collective_rpc"),
        (False, httpx.ReadTimeout("late"), "late"),
    ],
)
def test_a_server_that_does_not_get_to_level_3_sleeps_at_level_1(of_gate: bool, answer: Answer, why: str) -> None:
    server = Server(**{STATUS: OF_GATE}, sleep=[answer]) if of_gate else Server(collective_rpc=[answer])
    outcome = do(server, lambda one: _with_gate(one, 3, 1) if of_gate else one.sleep(3))
    assert (outcome.error, outcome.state, outcome.level) == (None, Phase.ASLEEP, 1)
    assert why in outcome.why_not_deeper


def test_without_the_layer_level_3_is_level_1() -> None:
    """VLLM takes it for level 2, or refuses it."""
    server = Server()
    outcome = do(server, lambda one: one.sleep(3), has_layer=False)
    assert (outcome.error, outcome.state, outcome.level) == (None, Phase.ASLEEP, 1)
    assert "not in its server" in outcome.why_not_deeper
    assert server.called == ["sleep?level=1"]


@pytest.mark.parametrize("lost", [1, 2])
def test_a_call_is_made_again_when_its_answer_is_lost(lost: int) -> None:
    server = Server(sleep=[*[LOST] * lost, httpx.Response(200)], wake_up=[*[LOST] * lost, httpx.Response(200)])
    assert do(server, lambda one: one.sleep(1)).state is Phase.ASLEEP
    assert do(server, lambda one: one.wake(1)).state is Phase.AWAKE


@pytest.mark.parametrize("code", [502, 504])
def test_a_proxy_without_an_answer_has_lost_it(code: int) -> None:
    lost = httpx.Response(code, text="Bad Gateway")
    server = Server(sleep=[lost, httpx.Response(200)], wake_up=[lost, httpx.Response(200)])
    assert do(server, lambda one: one.sleep(1), has_layer=False) == Outcome(None, Phase.ASLEEP, 1)
    assert do(server, lambda one: one.wake(1), has_layer=False) == Outcome(None, Phase.AWAKE)
    failed = do(Server(wake_up=[lost]), lambda one: one.wake(1), has_layer=False)
    assert (failed.error, failed.state) == (f"/wake_up: {code}: Bad Gateway", None)


@pytest.mark.parametrize("error", [LOST, httpx.ReadTimeout("late")])
def test_nothing_is_certain_when_no_answer_comes(error: Exception) -> None:
    """The server may still be at it, whatever it says that it is in now."""
    server = Server(sleep=[error], wake_up=[error], is_sleeping=AWAKE)
    assert do(server, lambda one: one.sleep(1)).state is None
    assert do(server, lambda one: one.wake(1)).state is None
    assert do(server, lambda one: one.wake(2)).state is None


def test_after_a_failed_sleep_the_scheduler_is_resumed() -> None:
    server = Server(sleep=[FAILS], is_sleeping=AWAKE)
    assert do(server, lambda one: one.sleep(1)) == Outcome("/sleep: 500: it failed", Phase.AWAKE)
    assert server.called == ["sleep?level=1", "wake_up", "is_sleeping"]
    assert do(Server(sleep=[FAILS], is_sleeping=ASLEEP), lambda one: one.sleep(1)).state is None
    assert do(Server(sleep=[FAILS], wake_up=[FAILS]), lambda one: one.sleep(1)).state is None


@pytest.mark.parametrize(
    "says",
    [
        {"detail": "OutOfHostMemory: sleep needs 16.00 GiB"},
        {"error": {"message": "Call to sleep method failed: host memory for backups: needed 16.00 GiB (limit: vault)"}},
        {"error": {"message": "Call to sleep method failed: no vault answers at <path>: [Errno 2] No such file"}},
    ],
)
def test_a_want_of_host_memory_is_told_apart(says: dict[str, object]) -> None:
    refused = httpx.Response(500, json=says)
    assert do(Server(sleep=[refused], is_sleeping=AWAKE), lambda one: one.sleep(1)).lacks_host_memory
    assert not do(Server(sleep=[FAILS], is_sleeping=AWAKE), lambda one: one.sleep(1)).lacks_host_memory


def test_a_failed_wake_leaves_a_model_asleep_only_where_this_layer_is_in_it() -> None:
    assert do(Server(wake_up=[FAILS], is_sleeping=ASLEEP), lambda one: one.wake(1)).state is Phase.ASLEEP
    assert do(Server(wake_up=[FAILS], is_sleeping=AWAKE), lambda one: one.wake(1)).state is None
    assert do(Server(wake_up=[FAILS], is_sleeping=ASLEEP), lambda one: one.wake(1), has_layer=False).state is None
    assert do(Server(sleep=[FAILS], is_sleeping=AWAKE), lambda one: one.sleep(1), has_layer=False).state is None


def test_a_look_first_completes_a_wake_that_was_begun() -> None:
    server = Server(reload_weights=[FAILS, httpx.Response(200)], is_sleeping=AWAKE)

    async def twice(one: VllmEngine) -> Outcome:
        assert (await one.wake(2)).state is None
        return await one.look()

    assert do(server, twice) == Outcome(None, Phase.AWAKE)
    assert server.called[2:] == ["wake_up?tags=weights", "reload_weights", "wake_up?tags=kv_cache", "is_sleeping"]


@pytest.mark.parametrize(
    "answer", [LOST, httpx.Response(503), httpx.Response(200, json={"results": [{"version": "1"}]})]
)
def test_a_server_whose_workers_do_not_say_what_they_have_mapped_is_not_taken_for_asleep(answer: Answer) -> None:
    """A wake may have failed half-way, and its engine does not know."""
    found = do(Server(is_sleeping=ASLEEP, **{STATUS: [answer]}), lambda one: one.look())
    assert found.state is None
    assert "do not say" in (found.error or "")


def test_what_a_server_is_in() -> None:
    assert do(Server(is_sleeping=AWAKE), lambda one: one.look()) == Outcome(None, Phase.AWAKE)
    for backed_up_bytes, level in ((9, 1), (8, 2)):
        usage = {"weights": {"bytes": 9, "backed_up_bytes": backed_up_bytes, "mapped_bytes": 0}}
        says = httpx.Response(200, json={"results": [{"usage": usage}]})
        server = Server(is_sleeping=ASLEEP, **{STATUS: [says]})
        assert do(server, lambda one: one.look()) == Outcome(None, Phase.ASLEEP, level)
    found = do(Server(is_sleeping=ASLEEP), lambda one: one.look(), has_layer=False)
    assert found == Outcome(None, Phase.ASLEEP, 2)
    assert do(Server(is_sleeping=[httpx.ConnectError("no")]), lambda one: one.look()).state is Phase.STOPPED
    for answer in (LOST, FAILS, httpx.Response(200, text="yes"), httpx.Response(200, json=[])):
        found = do(Server(is_sleeping=[answer]), lambda one: one.look())
        assert found.error
        assert found.state is None


def test_a_server_without_sleep_mode_says_what_it_needs() -> None:
    server = Server(**{name: [httpx.Response(404)] for name in ("sleep", "wake_up", "is_sleeping")})
    for call in (lambda one: one.look(), lambda one: one.sleep(1), lambda one: one.wake(1)):
        error = str(do(server, call).error)
        assert "--enable-sleep-mode" in error
        assert "CUMEM_SLEEP_ADMIN_TOKEN, or VLLM_SERVER_DEV_MODE=1" in error


def _usage(nbytes: int, backed_up_bytes: int = 0) -> dict[str, int]:
    return {"bytes": nbytes, "backed_up_bytes": backed_up_bytes}


@pytest.mark.parametrize(
    ("answer", "facts"),
    [
        (
            httpx.Response(200, json={"results": [{"usage": {"weights": _usage(5, 3), "kv_cache": _usage(9, 9)}}] * 2}),
            Facts("active", 10, 6),
        ),
        (
            httpx.Response(
                200, json={"results": [{"usage": {"weights": _usage(5, 3)}, "place": {"vault": "/v/sock"}}]}
            ),
            Facts("active", 5, 3, "/v/sock"),
        ),
        *(
            (httpx.Response(200, json={"results": [{"usage": {"weights": _usage(5, 3)}, "place": place}]}), Facts())
            for place in ({"vault": None}, {"vault": "a\0"}, 3)
        ),
        (httpx.Response(200, json={"results": [{"usage": {}}]}), Facts("")),
        (FAILS, Facts("")),
        (httpx.Response(200, json={"results": [None]}), Facts()),
        (LOST, Facts()),
    ],
)
@pytest.mark.parametrize("path", [STATUS, "collective_rpc"])
def test_what_a_server_says_of_this_layer(answer: Answer, facts: Facts, path: str) -> None:
    server = Server(**{path: [answer]})
    assert do(server, lambda one: one.facts()) == facts  # type: ignore[comparison-overlap]
    assert server.called == [STATUS] if path == STATUS else [STATUS, path]


def _keeps(*said: object) -> httpx.Response:
    """What a worker for each of these says that it keeps of 9 bytes of KV cache."""
    kv_cache = [{**_usage(9, 0), "kept_bytes": each} for each in said]
    return httpx.Response(
        200, json={"results": [{"usage": {"weights": _usage(5, 3), "kv_cache": of}} for of in kv_cache]}
    )


@pytest.mark.parametrize(
    ("said", "kept_bytes"),
    [
        ((4, 2), 6),
        ((4, 1 << 70), 4 + 9),
        *(((4, nonsense), 4) for nonsense in (-3, "3", 3.5, True, None, [3], {"bytes": 3})),
    ],
)
def test_what_a_sleeper_keeps_of_its_kv_cache_is_never_more_than_that(
    said: tuple[object, ...], kept_bytes: int
) -> None:
    async def ask(one: VllmEngine) -> Outcome:
        assert (await one.facts()).host_bytes == 10
        assert one.kept_bytes == kept_bytes
        return Outcome()

    do(Server(**{STATUS: [_keeps(*said)]}), ask)


@pytest.mark.parametrize(
    "answer",
    [
        *(
            httpx.Response(200, json={"results": results})
            for results in ([{}], [{"usage": None}], [{"usage": 3}], "x", 3)
        ),
        httpx.Response(200, json={"results": [{"usage": {"weights": _usage(5, 3), "kv_cache": None}}]}),
        httpx.Response(200, text='{"results": [{"usage": {"weights": {"bytes": Infinity, "backed_up_bytes": 0}}}]}'),
        httpx.Response(200, text="nonsense"),
        httpx.Response(503),
        FAILS,
        LOST,
    ],
)
def test_a_server_that_does_not_say_what_it_keeps_is_taken_to_keep_what_it_said_last(answer: Answer) -> None:
    async def ask(one: VllmEngine) -> Outcome:
        for _ in range(2):
            await one.facts()
            assert one.kept_bytes == 4
        return Outcome()

    do(Server(**{STATUS: [_keeps(4), answer]}), ask)


@pytest.mark.parametrize(
    ("reset", "says", "why", "kept_bytes"),
    [
        (httpx.Response(200, json={"success": True}), _keeps(0), "", 0),
        (httpx.Response(200, json={"success": True}), _keeps(4), "it still keeps 4 bytes", 4),
        (httpx.Response(200, json={"success": True}), LOST, "it still keeps 4 bytes", 4),
        (httpx.Response(404), _keeps(4), "Failed: its server has no calls", 4),
        (FAILS, _keeps(4), "Failed: /reset_prefix_cache: 500: it failed", 4),
        (LOST, _keeps(4), "RemoteProtocolError: lost", 4),
        (httpx.ReadTimeout("late"), _keeps(4), "ReadTimeout: late", 4),
    ],
)
def test_a_sleeper_gives_up_what_it_keeps_or_it_is_counted_still(
    reset: Answer, says: Answer, why: str, kept_bytes: int
) -> None:
    async def ask(one: VllmEngine) -> Outcome:
        await one.facts()
        found = await one.give_up_kept()
        assert found.startswith(why) if why else not found
        assert one.kept_bytes == kept_bytes
        return Outcome()

    do(Server(**{STATUS: [_keeps(4), says], "reset_prefix_cache": [reset]}), ask)


def _workers(mapped_bytes: int) -> httpx.Response:
    usage = {"weights": {"bytes": 6 << 30, "mapped_bytes": mapped_bytes, "backed_up_bytes": 6 << 30}}
    return httpx.Response(200, json={"results": [{"usage": usage}, {"usage": usage}]})


def test_a_server_that_says_it_sleeps_while_its_workers_have_memory_mapped_is_not_believed() -> None:
    server = Server(is_sleeping=ASLEEP, collective_rpc=[_workers(3 << 30)])
    found = do(server, lambda one: one.look())
    assert found.state is None
    assert found.error == "it says that it sleeps, and its workers have 6.0 GiB mapped"
