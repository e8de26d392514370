"""The vault's metrics as Prometheus reads them, and the HTTP server that shows them.

The server is a face of the vault's status, nothing more: it asks the vault as any client does, once a second at most.
So whoever floods it, or keeps it waiting, holds up nobody but its other readers.
"""

from __future__ import annotations

import math
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from types import TracebackType
from typing import Any, cast

from ..errors import CumemSleepError, VaultError
from ..metrics import CONTENT_TYPE, VAULT, VAULT_CLIENT, VAULT_GPU, Metric, Samples

_PATH = "/metrics"
_MOST_AT_ONCE = 16
_DEADLINE_S = 10.0


def prometheus(facts: Mapping[str, Any]) -> str:
    """The vault's status in the text format, version 0.0.4."""
    samples = Samples({**VAULT, **VAULT_GPU, **VAULT_CLIENT})
    _add(samples, VAULT, "vault_", {**facts, "clients": len(facts["clients"])})
    for gpu in facts["gpus"]:
        _add(samples, VAULT_GPU, "vault_gpu_", gpu, gpu=gpu["uuid"])
    for client in facts["clients"]:
        _add(samples, VAULT_CLIENT, "vault_client_", client, pid=str(client["pid"]), name=client["name"])
    return samples.text()


def _add(samples: Samples, table: Mapping[str, Metric], prefix: str, facts: Mapping[str, Any], **labels: str) -> None:
    """What has no value, as the rate of what was never copied, is left out."""
    for name in table:
        if (value := facts[name.removeprefix(prefix)]) is not None:
            samples.add(name, value, **labels)


class MetricsServer(socketserver.ThreadingTCPServer):
    """Answers `GET /metrics`, and refuses everything else. A context: it serves inside.

    Attributes:
        url: where the metrics are.
    """

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = _MOST_AT_ONCE

    def __init__(
        self, host: str, port: int, text: Callable[[], str], *, fresh_s: float = 1.0, deadline_s: float = _DEADLINE_S
    ) -> None:
        """Take the port.

        Args:
            port: 0: one that is free.
            text: gives the metrics. Raises CumemSleepError where there are none now.
            fresh_s: for so long an answer serves all who ask.
            deadline_s: for one request and its answer.

        Raises:
            VaultError: somebody else has the port, or this host has no such address.
        """
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._ask = text
        self._fresh_s, self._deadline_s = fresh_s, deadline_s
        self._asking = threading.Lock()
        self._text, self._asked = "", -math.inf
        self._places = threading.BoundedSemaphore(_MOST_AT_ONCE)
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:  # an address in use, a host without a name
            raise VaultError(
                f"metrics at {_shown(host)}:{port}: {error.strerror or error}; name another address with --metrics"
            ) from None
        self.url = f"http://{_shown(host)}:{self.server_address[1]}{_PATH}"

    def __enter__(self) -> MetricsServer:
        threading.Thread(target=self.serve_forever, name="vault-metrics", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()
        self.server_close()

    def text(self) -> str:
        """The metrics, as old as `fresh_s` at most. Raises CumemSleepError: there are none now."""
        with self._asking:
            if time.monotonic() - self._asked >= self._fresh_s:
                self._text = self._ask()
                self._asked = time.monotonic()
            return self._text

    def process_request(self, request: Any, client_address: Any) -> None:
        """On a thread of its own, if there are not too many already."""
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Until it is answered, or the deadline: a reader that says a byte a second is not waited for."""
        deadline = threading.Timer(self._deadline_s, _end, [request])
        deadline.daemon = True
        deadline.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            deadline.cancel()
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """That a reader has gone concerns nobody."""


class _Handler(BaseHTTPRequestHandler):
    """One request: HTTP/1.0, so the connection ends with the answer. What is not HTTP, the base class refuses."""

    timeout = _DEADLINE_S
    server_version, sys_version = "cumem-sleep", ""

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != _PATH:
            self._answer(404, f"only {_PATH} is here\n")
            return
        try:
            self._answer(200, cast(MetricsServer, self.server).text(), CONTENT_TYPE)
        except CumemSleepError as error:
            self._answer(503, f"{error}\n")

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002
        """As the base class refuses what it does not understand, without its page of HTML."""
        self._answer(code, f"{message or 'refused'}\n")

    def _answer(self, code: int, text: str, kind: str = "text/plain; charset=utf-8") -> None:
        body = text.encode(errors="replace")
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: scrapes come every few seconds."""


def _end(request: socket.socket) -> None:
    with suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host
