"""What `vllm serve` behind the gate is to a client at level 3, without vLLM: the layer is real, its driver simulated.

It takes vLLM's arguments. `FAKE_BROKEN` (JSON) says what it does wrong, if its name ends with
`FAKE_BROKEN_SERVER`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pathlib
import signal
import subprocess
import sys
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import Any

from cumem_sleep import CuMemAllocator, _core

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=pathlib.Path)
parser.add_argument("--served-model-name", required=True)
parser.add_argument("--host", required=True)
parser.add_argument("--port", type=int, required=True)
parser.add_argument("--middleware", required=True)
parser.add_argument("--worker-extension-cls", required=True)
arguments, others = parser.parse_known_args()
assert "--enable-sleep-mode" in others
assert os.environ["VLLM_SERVER_DEV_MODE"] == "1"
assert os.environ["CUMEM_SLEEP_ON_REQUEST"] == "wake"
is_broken = arguments.served_model_name.endswith(os.environ.get("FAKE_BROKEN_SERVER", ""))
BROKEN: dict[str, int] = json.loads(os.environ.get("FAKE_BROKEN", "{}")) if is_broken else {}
if BROKEN.get("does_not_start"):
    sys.exit("no such kernel")

allocator = CuMemAllocator.get_instance()
allocator.malloc(8 << 20, "weights")
allocator.malloc(32 << 20, "kv_cache")


print("Graph capturing finished", flush=True)


class Model:
    def __init__(self) -> None:
        self.asleep = False
        self.level = 0
        self.sleeps = 0
        self.kept: list[bytes] = []
        self.turn = Lock()

    def sleep(self) -> dict[str, Any]:
        self.sleeps += not self.asleep
        if BROKEN.get("dies_at_sleep") == self.sleeps:
            print("last words", flush=True)
            os._exit(3)
        if self.sleeps >= BROKEN.get("stays_from_sleep", 1 << 30):
            return {"status": "sleeping", "level": 1, "why_not_deeper": "someone calls CUDA"}
        if BROKEN.get("pretends"):
            return {"status": "sleeping", "level": 3}
        if not self.asleep:
            allocator.sleep(offload_tags=("weights",))
        report = allocator.deepen()
        self.asleep, self.level = True, 3
        assert not report.why_not_deeper, report
        return {"status": "sleeping", "level": 3}

    def wake(self) -> None:
        with self.turn:
            if self.asleep:
                allocator.wake_up()
                self.asleep, self.level = False, 0
                if BROKEN.get("leaves_helper"):
                    words = ["import time; time.sleep(30)", "cumem_sleep.checkpoint.helper", str(os.getpid())]
                    subprocess.Popen([sys.executable, "-c", *words], start_new_session=True)
                if BROKEN.get("captures_again"):
                    print("Graph capturing finished", flush=True)
                if BROKEN.get("leaks_gpu"):
                    allocator.malloc(BROKEN["leaks_gpu"], "leak")
                if BROKEN.get("leaks_host"):
                    self.kept.append(os.urandom(BROKEN["leaks_host"]))

    def token(self, prompt: list[int], number: int) -> int:
        forgets = self.sleeps >= BROKEN.get("forgets_at_sleep", 1 << 30)
        return hashlib.sha256(f"{arguments.served_model_name} {prompt} {number} {forgets}".encode()).digest()[0]

    def status(self) -> dict[str, Any]:
        return {
            "operations": {name: asdict(totals) for name, totals in allocator.totals().items() if name not in BROKEN},
            "usage": {tag: asdict(usage) for tag, usage in allocator.usage().items()},
        }

    def call(self, method: str) -> Any:
        assert arguments.worker_extension_cls == "worker_extension.Extension"
        if method == "cumem_sleep_status":
            return self.status()
        self.wake()  # as the plugin does for any other
        return {"process_id": os.getpid(), "fill_with_normal_values": 8 << 20}[method]


model = Model()


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, content: object = None, kind: str = "application/json") -> None:
        body = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        level = 1 if BROKEN.get("says_level_1") and model.level else model.level
        if self.path == "/health":
            self.answer(200, {"status": "asleep", "asleep": True, "level": level} if level else "")
        elif self.path == "/is_sleeping":
            self.answer(200, {"is_sleeping": model.asleep})
        elif self.path == "/metrics":
            self.answer(200, f'# TYPE\ncumem_sleep_sleep_level{{rank="0"}} {float(level)}\n', "text/plain")
        elif self.path == "/v1/models":
            self.answer(200, {"data": [{"id": arguments.served_model_name}]})
        else:
            self.answer(404)

    def do_POST(self) -> None:
        body: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "{}")
        if self.path == "/sleep?level=1":
            allocator.sleep(offload_tags=("weights",))
            self.answer(200, "")
        elif self.path == "/sleep?level=3":
            self.answer(200, model.sleep())
        elif self.path == "/wake_up":
            model.wake()
            self.answer(200, "")
        elif self.path == "/collective_rpc":
            self.answer(200, {"results": [model.call(body["method"])]})
        elif self.path == "/v1/completions":
            self.complete(body)
        else:
            self.answer(404)

    def complete(self, body: dict[str, Any]) -> None:
        assert body["model"] == arguments.served_model_name
        assert body["stream"]
        assert body["return_token_ids"]
        model.wake()
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for number in range(body["max_tokens"]):
            choice = {"index": 0, "text": "", "token_ids": [model.token(body["prompt"], number)]}
            self.wfile.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")


def end(*_: object) -> None:
    if not BROKEN.get("ignores_sigterm"):
        assert _core.driver_calls_suspended() or model.level == 0
        sys.exit(0)


signal.signal(signal.SIGTERM, end)
ThreadingHTTPServer((arguments.host, arguments.port), Handler).serve_forever()
