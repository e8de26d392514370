"""OpenTelemetry spans of requests and switches, if its variables (`OTEL_…`) ask for them; else nothing is imported.

request             from its model's name to the end of its answer; it continues its client's trace
queue             until its model is awake
drain, sleep, …   the switches that it waits for, the one first that has waited longest
first token       until the first piece of a streamed answer
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentelemetry.trace import Span
    from opentelemetry.trace import TracerProvider as AnyProvider

logger = logging.getLogger("cumem_sleep.serve")

END_WITHIN_S = 2.0  # for the spans that are left: the front has its port, its pid and its lock so long
MODEL = "gen_ai.request.model"
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


def from_environment(variables: Mapping[str, str]) -> Tracing | None:
    """Spans to where the variables say; None if they ask for none, or if packages are missing or a variable has a value
    that cannot be, which is logged.

    Source: opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables.
    """
    by_default = "otlp" if any(variables.get(name) for name in _ENDPOINTS) else "none"
    named = (variables.get("OTEL_TRACES_EXPORTER") or by_default).split(",")
    names = [name.strip() for name in named if name.strip() not in ("", "none")]
    if not names or variables.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    try:
        return Tracing(_provider(names, variables))
    except (ImportError, LookupError) as error:
        logger.warning("OTEL_… ask for traces, and there are none (%s): pip install 'cumem-sleep[tracing]'", error)
    except ValueError as error:
        logger.warning("OTEL_… ask for traces, and there are none (%s)", error)
    return None


def _provider(names: Iterable[str], variables: Mapping[str, str]) -> AnyProvider:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    is_named = "OTEL_SERVICE_NAME" in variables or "service.name=" in variables.get("OTEL_RESOURCE_ATTRIBUTES", "")
    resource = Resource.create({} if is_named else {"service.name": "cumem-sleep"})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    protocol = next(filter(None, map(variables.get, _PROTOCOLS)), "http/protobuf")
    otlp = "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"
    for name in names:
        found = metadata.entry_points(group="opentelemetry_traces_exporter", name=otlp if name == "otlp" else name)
        exporter = next(iter(found), None)
        if exporter is None:
            raise LookupError(f"no exporter {name!r} ({protocol}) is installed")
        provider.add_span_processor(BatchSpanProcessor(exporter.load()()))
    return provider


class Tracing:
    """Where spans go. Times are of the monotonic clock."""

    def __init__(self, provider: AnyProvider) -> None:
        from opentelemetry import propagate, trace

        self._provider = provider
        self._tracer = provider.get_tracer("cumem_sleep.serve")
        self._trace, self._propagate = trace, propagate

    def request(self, model: str, headers: Iterable[tuple[bytes, bytes]]) -> Span:
        """A request begins; its span is to be ended."""
        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
        context = self._propagate.extract(carrier)
        return self._tracer.start_span("request", context, self._trace.SpanKind.SERVER, {MODEL: _whole(model)})

    def span(
        self, name: str, within: Span | None, begin_s: float, end_s: float, error: str | None = None, **attributes: Any
    ) -> Span:
        """Something that has ended, within a span, or on its own."""
        context = None if within is None else self._trace.set_span_in_context(within)
        known = {name: value for name, value in attributes.items() if value is not None}
        if "model" in known:
            known[MODEL] = known.pop("model")
        span = self._tracer.start_span(_whole(name), context, attributes=known, start_time=_unix_ns(begin_s))
        if error is not None:
            span.set_status(self._trace.StatusCode.ERROR, _whole(error))
        span.end(_unix_ns(end_s))
        return span

    def headers(self, span: Span) -> list[tuple[bytes, bytes]]:
        """By which a server continues the trace."""
        carrier: dict[str, str] = {}
        self._propagate.inject(carrier, self._trace.set_span_in_context(span))
        return [(name.encode(), value.encode()) for name, value in carrier.items()]

    def end(self) -> None:
        """Send what is left, if a collector takes it in time: OpenTelemetry itself would try for half a minute."""
        if (shutdown := getattr(self._provider, "shutdown", None)) is not None:
            sending = threading.Thread(target=shutdown, daemon=True)
            sending.start()
            sending.join(END_WITHIN_S)


def _whole(text: str) -> str:
    """Clients and servers may say halves of letters, of which one would cost all spans that are sent along."""
    return text.encode(errors="replace").decode()


def _unix_ns(at_s: float) -> int:
    return time.time_ns() - int((time.monotonic() - at_s) * 1e9)
