"""Spans of requests and switches, by OpenTelemetry's own exporter into memory."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from front_world import a_world, post
from servers_of_tests import client_of, command, config, running, until

from cumem_sleep.serve import tracing
from cumem_sleep.serve.fleet import Fleet
from cumem_sleep.serve.status import Phase
from cumem_sleep.serve.tracing import MODEL, Tracing

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CONTENT = {"Content-Type": "application/json"}
PARENT = f"00-{TRACE}-{CALLER}-01"

opentelemetry = pytest.importorskip("opentelemetry.sdk.trace", reason="needs opentelemetry-sdk")


class Traced:
    """Where spans go."""

    def __init__(self) -> None:
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        self.memory = InMemorySpanExporter()
        provider = opentelemetry.TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.memory))
        self.tracing = Tracing(provider)

    def within(self, parent: int | None) -> dict[tuple[str, Any], Any]:
        """The spans in this one, by their names and models, in the order in which they began."""
        spans = [
            span
            for span in self.memory.get_finished_spans()
            if (span.parent.span_id if span.parent is not None else None) == parent
        ]
        spans.sort(key=lambda span: span.start_time or 0)
        return {(span.name, span.attributes.get(MODEL)): span for span in spans}


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 300))


def seconds(span: Any) -> float:
    return float(span.end_time - span.start_time) / 1e9


@pytest.mark.slow
async def test_a_request_and_the_switch_that_it_waits_for_are_one_trace(tmp_path: Path) -> None:
    traced = Traced()
    slow = {"command": command("a", "--sleep-seconds=0.1", "--weights-bytes=1"), "at_start": "awake"}
    waking = {"command": command("b", "--wake-seconds=0.1", "--weights-bytes=1")}

    async with running(config(tmp_path, a=slow, b=waking), tracing=traced.tracing) as fleet:
        await until(fleet, a=Phase.AWAKE)
        await fleet.sleep("a")
        await until(fleet, b=Phase.ASLEEP)
        await fleet.wake("a")
        traced.memory.clear()
        async with client_of(fleet) as client:
            body = {"model": "b", "prompt": "?", "stream": True}
            answer = await client.post("/v1/completions", json=body, headers={"traceparent": PARENT})
            assert answer.status_code == 200
    (request,) = traced.within(int(CALLER, 16)).values()
    assert (request.name, request.attributes[MODEL]) == ("request", "b")
    assert request.attributes["http.response.status_code"] == 200
    parts = traced.within(request.context.span_id)
    assert list(parts) == [("queue", "b"), ("drain", "a"), ("sleep", "a"), ("wake", "b"), ("first token", None)]
    assert parts["queue", "b"].attributes["found"] == "asleep"
    assert parts["sleep", "a"].attributes["level"] == 1
    for change in (parts["sleep", "a"], parts["wake", "b"]):
        assert 0.09 < seconds(change) <= seconds(parts["queue", "b"])
    assert {span.context.trace_id for span in traced.memory.get_finished_spans()} == {int(TRACE, 16)}
    assert seconds(parts["queue", "b"]) + seconds(parts["first token", None]) <= seconds(request)


async def test_a_drain_belongs_to_the_request_that_waits_for_it(tmp_path: Path) -> None:
    traced = Traced()

    async with running(config(tmp_path, a={}, b={}), tracing=traced.tracing) as fleet:
        await until(fleet, a=Phase.ASLEEP, b=Phase.ASLEEP)
        runs, waits = (traced.tracing.request(name, ()) for name in ("a", "b"))
        async with fleet.lease("a", runs):
            traced.memory.clear()
            waiting = asyncio.create_task(_use(fleet, "b", waits))
            await until(fleet, a=Phase.DRAINING)
        await waiting
        runs.end()
        waits.end()
        parts = traced.within(waits.get_span_context().span_id)
        assert list(parts) == [("queue", "b"), ("drain", "a"), ("sleep", "a"), ("wake", "b")]
        assert traced.within(runs.get_span_context().span_id) == {}


async def _use(fleet: Fleet, model: str, span: Any) -> None:
    async with fleet.lease(model, span):
        pass


@pytest.mark.slow
async def test_what_fails_says_why_and_what_nobody_asked_for_stands_alone(tmp_path: Path) -> None:
    traced = Traced()
    one = {"command": command("a", "--fail-wakes=9")}

    async with running(config(tmp_path, a=one), tracing=traced.tracing) as fleet:
        await until(fleet, a=Phase.ASLEEP)
        alone = traced.within(None)
        assert ("start", "a") in alone
        assert ("sleep", "a") in alone
        assert alone["start", "a"].status.is_unset
        await fleet.wake("a")  # by a start
        failed = [span for span in traced.memory.get_finished_spans() if span.name == "wake"]
        assert "a wake that was to fail" in failed[0].status.description


def test_a_server_continues_the_trace_of_its_request() -> None:
    traced = Traced()

    async def scenario() -> None:
        async with a_world("one") as world:
            world.fleet.tracing = traced.tracing
            server = await world.server("one")
            request = post("/v1/completions", b'{"model": "one"}', f"traceparent: {PARENT}", "tracestate: a=1")
            assert (await world.ask(request)).code == 200
            while not (spans := traced.within(int(CALLER, 16))):
                await asyncio.sleep(0.01)
            (span,) = spans.values()
            (asked,) = server.asked
            assert asked.header("traceparent") == f"00-{TRACE}-{span.context.span_id:016x}-01"
            assert asked.head.count("traceparent") == asked.head.count("tracestate: a=1") == 1

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("variables", "exporters"),
    [
        ({}, None),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}, None),
        ({"OTEL_TRACES_EXPORTER": "console", "OTEL_SDK_DISABLED": "True"}, None),
        ({"OTEL_TRACES_EXPORTER": "console"}, ["ConsoleSpanExporter"]),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}, ["OTLPSpanExporter"]),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:1"}, ["OTLPSpanExporter"]),
        ({"OTEL_TRACES_EXPORTER": "console, otlp"}, ["ConsoleSpanExporter", "OTLPSpanExporter"]),
        ({"OTEL_TRACES_EXPORTER": "no_such"}, None),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, None),  # not in the extra
    ],
)
def test_the_standard_variables_say_where_spans_go(
    variables: dict[str, str], exporters: list[str] | None, caplog: pytest.LogCaptureFixture
) -> None:
    if "grpc" in variables.values() and _has_grpc():
        pytest.skip("gRPC's exporter is installed")
    with caplog.at_level(logging.WARNING):
        found = tracing.from_environment(variables)
    if exporters is None:
        assert found is None
        is_missing = {"no_such", "grpc"} & set(variables.values())
        assert ("pip install 'cumem-sleep[tracing]'" in caplog.text) == bool(is_missing)
    else:
        assert found is not None
        provider: Any = found._provider
        processors = provider._active_span_processor._span_processors
        assert [type(each.span_exporter).__name__ for each in processors] == exporters
        assert provider.resource.attributes["service.name"] == "cumem-sleep"
        found.end()


@pytest.mark.slow
def test_a_front_ends_although_no_collector_takes_its_spans(tmp_path: Path) -> None:
    """One that takes connections, and no more."""
    file = tmp_path / "models.yaml"
    model = {"engine": "vllm", "command": command("one"), "at_start": "stopped"}
    file.write_text(json.dumps({"front": {"port": 0}, "logs": str(tmp_path / "logs"), "models": {"one": model}}))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = f"http://127.0.0.1:{silent.getsockname()[1]}"
        variables = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": where, "OTEL_EXPORTER_OTLP_TIMEOUT": "60"}
        started = [sys.executable, "-m", "cumem_sleep", "serve", str(file)]
        with subprocess.Popen(started, env=variables, stderr=subprocess.PIPE, text=True) as front:
            assert front.stderr is not None
            while (listens := re.search(r"listens at (\S+);", front.stderr.readline())) is None:
                assert front.poll() is None
            request = urllib.request.Request(f"{listens[1]}/v1/completions", b'{"model": "one"}', CONTENT)
            with urllib.request.urlopen(request, timeout=60) as answer:
                assert answer.status == 200
            front.terminate()
            told = time.monotonic()
            front.stderr.read()
            assert front.wait() == 0
            assert time.monotonic() - told < 20.0, "OpenTelemetry itself tries for 30 s"
    assert not (tmp_path / ".models.yaml.lock").exists()


def _has_grpc() -> bool:
    try:
        import opentelemetry.exporter.otlp.proto.grpc  # noqa: F401
    except ImportError:
        return False
    return True


@pytest.mark.slow
def test_without_the_variables_nothing_of_opentelemetry_is_imported() -> None:
    program = (
        "import os, sys; from cumem_sleep.serve import main, tracing; assert tracing.from_environment({}) is None;"
        " sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
