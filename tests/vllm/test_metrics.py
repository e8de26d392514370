"""The layer's metrics on vLLM's `/metrics`: what the gate asks for, and what Prometheus gets to read."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from fake_vllm import FakeEngine, until_idle
from gate_client import Serve, run

from cumem_sleep.vllm import metrics

_register = metrics.register


@pytest.fixture
def registers(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate registers metrics indeed, where the tests of the gate only say so."""
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    monkeypatch.setattr(metrics, "register", _register)


# Asking the workers


async def test_asked_after_every_change_and_at_every_scrape(serve: Serve) -> None:
    client = serve()
    engine, status = client.engine, client.gate._status
    await client.ask()
    assert engine.count("cumem_sleep_status") == 0
    await client.post("/sleep")
    assert engine.count("cumem_sleep_status") == 1
    assert status.ranks[0]["usage"]["weights"]["mapped_bytes"] == 0
    await client.post("/wake_up")
    await until_idle()
    assert engine.count("cumem_sleep_status") == 2
    assert status.ranks[1]["usage"]["weights"]["mapped_bytes"] == 600
    assert (await client.get("/metrics")).code == 200
    assert engine.count("cumem_sleep_status") == 3


async def test_an_engine_that_does_not_answer_does_not_hang_the_scrape(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = serve()
    await client.get("/metrics")
    ranks = client.gate._status.ranks
    monkeypatch.setattr(metrics, "ANSWER_WITHIN_S", 0.01)
    client.engine.waits["cumem_sleep_status"] = asyncio.Event()
    for _ in range(3):
        assert (await client.get("/metrics")).code == 200
    assert client.gate._status.ranks is ranks, "the last snapshot stays"
    assert client.engine.count("cumem_sleep_status") == 2, "and nobody asks twice at a time"
    client.engine.waits["cumem_sleep_status"].set()
    await until_idle()
    assert client.gate._status.ranks is not ranks, "a late answer is one, too"


async def test_a_scrape_during_a_sleep_asks_nothing(serve: Serve) -> None:
    client = serve()
    client.engine.waits["sleep"] = asyncio.Event()
    sleep = await client.under_way("/sleep")
    assert (await client.get("/metrics")).code == 200
    assert client.engine.count("cumem_sleep_status") == 0
    client.engine.waits["sleep"].set()
    await sleep.response()


async def test_without_the_plugin_nobody_asks_again(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    client = serve()
    client.engine.plugin = False
    for _ in range(3):
        assert (await client.get("/metrics")).code == 200
    await client.post("/sleep")
    assert (await client.ask()).code == 503, "the gate works without"
    await client.post("/wake_up")
    assert (await client.ask()).code == 200
    assert client.engine.count("cumem_sleep_status") == 1
    assert client.gate._status.ranks == []
    assert sum("not active" in record.message for record in caplog.records) == 1


async def test_other_failures_pass(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    client = serve()
    client.engine.fails["cumem_sleep_status"] = [RuntimeError("a worker stumbled")]
    assert (await client.get("/metrics")).code == 200
    assert (await client.get("/metrics")).code == 200
    assert len(client.gate._status.ranks) == 2
    ours = (record for record in caplog.records if record.name.startswith("cumem_sleep"))
    assert not [record for record in ours if record.levelno >= logging.WARNING]


@pytest.mark.usefixtures("registers")
async def test_several_api_servers_leave_the_metrics_out(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "/tmp/nowhere")
    client = serve()
    assert (await client.get("/metrics")).code == 200
    assert client.engine.calls == []
    assert sum("left out" in record.message for record in caplog.records) == 1


# What Prometheus reads


def samples(collector: metrics.Collector) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in collector.collect()
        for sample in family.samples
    }


def collector_of(engine: FakeEngine, outcomes: Counter[str] | None = None) -> metrics.Collector:
    status = metrics.WorkerStatus()
    run(_ask(status, engine))
    return metrics.Collector(status, outcomes or Counter())


async def _ask(status: metrics.WorkerStatus, engine: FakeEngine) -> None:
    assert await status.fresh(engine)


EXPECTED = {
    "info": [({"devices": "4", "simulated": "true"}, 1)],
    "sleep_level": [({}, 1)],
    "device_used_bytes": [({}, 50)],
    "device_total_bytes": [({}, 2000)],
    "memory_bytes": [
        ({"tag": "weights", "state": "mapped"}, 0),
        ({"tag": "weights", "state": "asleep"}, 600),
        ({"tag": "kv_cache", "state": "mapped"}, 400),
        ({"tag": "kv_cache", "state": "asleep"}, 0),
    ],
    "host_bytes": [({"tag": "weights"}, 600), ({"tag": "kv_cache"}, 0)],
    "vault_bytes": [({"tag": "weights"}, 0), ({"tag": "kv_cache"}, 0)],
    "shared_bytes": [({"tag": "weights"}, 0), ({"tag": "kv_cache"}, 0)],
    "kept_bytes": [({"tag": "weights"}, 0), ({"tag": "kv_cache"}, 0)],
    "backed_up_bytes": [({"tag": "weights"}, 600), ({"tag": "kv_cache"}, 0)],
    "segments": [({"tag": "weights"}, 2), ({"tag": "kv_cache"}, 2)],
    "operations_total": [
        ({"operation": "sleep", "result": "ok"}, 3),
        ({"operation": "sleep", "result": "failed"}, 1),
    ],
    "operation_seconds_total": [({"operation": "sleep"}, 2.5)],
    "operation_phase_seconds_total": [
        ({"operation": "sleep", "phase": "copy"}, 2.0),
        ({"operation": "sleep", "phase": "unmap"}, 0.5),
    ],
    "operation_bytes_total": [
        ({"operation": "sleep", "kind": "freed"}, 1000),
        ({"operation": "sleep", "kind": "copied"}, 600),
    ],
}


def test_families() -> None:
    pytest.importorskip("prometheus_client", reason="needs prometheus_client (in vLLM's environments)")
    engine = FakeEngine()
    engine.asleep, engine.backed_up = {"weights"}, True
    found = samples(collector_of(engine, Counter(rejected=3, woke=1)))
    wanted = {
        (f"cumem_sleep_{name}", frozenset({**labels, "rank": "0"}.items())): value
        for name, values in EXPECTED.items()
        for labels, value in values
    }
    for outcome, count in (("rejected", 3), ("woke", 1)):
        wanted[("cumem_sleep_gate_requests_total", frozenset({("outcome", outcome)}))] = count
    wanted["cumem_sleep_active", frozenset()] = 1
    of_rank_1 = {key for key in found if ("rank", "1") in key[1]}
    assert {key: value for key, value in found.items() if key not in of_rank_1} == wanted
    assert len(of_rank_1) == sum(map(len, EXPECTED.values()))


def test_where_the_layer_is_not_at_work_a_sample_says_so() -> None:
    pytest.importorskip("prometheus_client", reason="needs prometheus_client (in vLLM's environments)")
    engine, status = FakeEngine(), metrics.WorkerStatus()
    assert not samples(metrics.Collector(status, Counter())), "nobody has been asked"
    engine.plugin = False
    asyncio.run(status.fresh(engine))
    unused = FakeEngine()  # the plugin is there, and vLLM's memory does not come from it
    vars(unused)["status"] = lambda rank: {**engine.status(rank), "usage": {}}
    for collector in (metrics.Collector(status, Counter()), collector_of(unused)):
        assert samples(collector)["cumem_sleep_active", frozenset()] == 0


@pytest.mark.parametrize(("lost", "up"), [("", 1), ("it has ended", 0)])
def test_backups_in_a_vault(lost: str, up: int) -> None:
    pytest.importorskip("prometheus_client", reason="needs prometheus_client (in vLLM's environments)")
    engine = FakeEngine()
    engine.backed_up, engine.place = True, {"vault": "/run/vault.sock", "lost": lost}
    found = samples(collector_of(engine))
    assert found["cumem_sleep_vault_up", frozenset({("rank", "1")})] == up
    for name, nbytes in (("host", 600), ("vault", 600), ("shared", 200)):
        assert found[f"cumem_sleep_{name}_bytes", frozenset({("rank", "1"), ("tag", "weights")})] == nbytes
        assert found[f"cumem_sleep_{name}_bytes", frozenset({("rank", "1"), ("tag", "kv_cache")})] == 0


def test_an_answer_that_is_not_understood_takes_nothing_down(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("prometheus_client", reason="needs prometheus_client (in vLLM's environments)")
    collector = collector_of(FakeEngine())
    del collector._status.ranks[1]["usage"]
    assert samples(collector) == samples(collector) == {}
    assert sum("not be understood" in record.message for record in caplog.records) == 1


@pytest.mark.usefixtures("registers")
async def test_a_later_gate_takes_the_place_over(serve: Serve) -> None:
    client = pytest.importorskip("prometheus_client", reason="needs prometheus_client (in vLLM's environments)")
    first, second = serve(), serve()
    assert "cumem_sleep_" not in client.generate_latest().decode(), "nothing is known yet"
    await first.post("/sleep")
    await first.ask()
    assert "cumem_sleep_" not in client.generate_latest().decode()
    await second.post("/sleep")
    await second.ask()
    text = client.generate_latest().decode()
    assert text.count('cumem_sleep_gate_requests_total{outcome="rejected"} 1.0') == 1
    assert text.count('cumem_sleep_segments{rank="1",tag="weights"} 2.0') == 1


def test_vllm_has_what_the_alert_about_it_compares() -> None:
    try:
        loggers = distribution("vllm").locate_file("vllm/v1/metrics/loggers.py")
    except PackageNotFoundError:
        pytest.skip("needs vLLM")
    source = Path(str(loggers)).read_text()
    assert re.search(r'name="vllm:engine_sleep_state",.+?labelnames=.*"sleep_state"', source, re.DOTALL)
    assert 'gauge_engine_sleep_state["awake"]' in source
