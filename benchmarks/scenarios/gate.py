"""`vllm serve` behind the gate."""

from __future__ import annotations

import contextlib
import http.client
import json
import sys
from pathlib import Path
from typing import Any

from .engines import KV_CACHE_BYTES
from .registry import LIMIT_S, check

DEV_MODE = {"VLLM_SERVER_DEV_MODE": "1"}


class GatedServer:
    """`vllm serve` of the small model behind the gate."""

    def __init__(self, folder: Path, name: str, port: int, *options: str) -> None:
        from model_server import Deadline, Server

        command = [
            *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder)),
            *("--skip-tokenizer-init", "--enable-sleep-mode", "--enforce-eager", "--max-model-len", "2048"),
            *("--gpu-memory-utilization", "0.05", "--kv-cache-memory-bytes", str(KV_CACHE_BYTES)),
            *("--middleware", "cumem_sleep.vllm.SleepGate", *options),
        ]
        log = folder.parent / f"serve_{name}.log"
        self.port = port
        self.server = Server("model", command, port, {}, log, Deadline(LIMIT_S - 20))

    def __enter__(self) -> GatedServer:
        self.server.start(180)
        return self

    def __exit__(self, *_: object) -> None:
        self.server.stop()
        print(self.server.log.read_text(errors="replace"))

    def ask(self, method: str, path: str, body: object = None, token: str = "") -> tuple[int, dict[str, str], Any]:
        """Status, headers and content of the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        content = response.read().decode()
        connection.close()
        with contextlib.suppress(json.JSONDecodeError):
            content = json.loads(content)
        return response.status, dict(response.getheaders()), content

    def expect(self, status: int, method: str, path: str, body: object = None, token: str = "") -> Any:
        found, _, content = self.ask(method, path, body, token)
        check(f"{method} {path}: {found} {content}", found == status)
        return content

    def tokens(self, prompt: list[int], token: str = "", *, max_tokens: int = 24) -> tuple[int, Any]:
        """Status, and the greedy tokens or the error."""
        request = {"model": "model", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        status, _, content = self.ask("POST", "/v1/completions", {**request, "return_token_ids": True}, token)
        return status, content["choices"][0]["token_ids"] if status == 200 else content
