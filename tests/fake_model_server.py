"""What `vllm serve` is to a client, without a model: health, streamed completions, sleep, wake, reloading.

It takes vLLM's arguments. Tokens depend on the model and the prompt, and on nothing else unless it is to be broken.
Two of them share a GPU on which one fits: `FAKE_GPU` is a folder, and who finds the other awake in it fails.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pathlib
import signal
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=pathlib.Path)
parser.add_argument("--served-model-name", required=True)
parser.add_argument("--host", required=True)
parser.add_argument("--port", type=int, required=True)
parser.add_argument("--quantization", default="")
parser.add_argument("--middleware")
parser.add_argument("--worker-extension-cls")
arguments, others = parser.parse_known_args()
assert "--enable-sleep-mode" in others
assert os.environ["VLLM_SERVER_DEV_MODE"] == "1"
config = json.loads((arguments.folder / "config.json").read_text())

GPU = pathlib.Path(os.environ["FAKE_GPU"], "in-use")
WAY = "vllm" if os.environ["CUMEM_SLEEP_DISABLE"] == "1" else "layer"
BROKEN = json.loads(os.environ.get("FAKE_BROKEN", "{}")) if os.environ.get("FAKE_BROKEN_WAY", WAY) == WAY else {}


class Model:
    def __init__(self) -> None:
        self.asleep: set[str] = set()
        self.weights_are_lost = False
        self.sleeps = 0
        self.asked = 0
        self.take_gpu()

    def take_gpu(self) -> None:
        with GPU.open("x") as file:  # fails if the other one is awake
            file.write(arguments.served_model_name)

    def sleep(self, level: int) -> None:
        self.sleeps += 1
        if BROKEN.get("dies_at_sleep") == self.sleeps:
            print("last words", flush=True)
            os._exit(3)
        assert not self.asleep
        self.asleep = {"weights", "kv_cache"}
        self.weights_are_lost = level == 2 or BROKEN.get("forgets_at_sleep") == self.sleeps
        GPU.unlink()

    def wake(self, tags: set[str]) -> None:
        if self.asleep == {"weights", "kv_cache"}:
            self.take_gpu()
        self.asleep -= tags

    def status(self) -> dict[str, Any]:
        """Its backups are complete when it is asked the second time."""
        assert WAY == "layer"
        self.asked += 1
        return {"usage": {"weights": {"bytes": 2, "backed_up_bytes": min(self.asked, 2)}}}

    def reload(self) -> None:
        assert "weights" not in self.asleep
        self.weights_are_lost = False

    def token(self, prompt: list[int], number: int) -> int:
        assert not self.asleep
        text = f"{config} {arguments.folder.name} {arguments.quantization} {prompt} {number} {self.weights_are_lost}"
        return hashlib.sha256(text.encode()).digest()[0]


model = Model()


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, content: object = None) -> None:
        body = b"" if content is None else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self.answer(200 if self.path == "/health" else 404)

    def do_POST(self) -> None:
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        body: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "{}")
        if url.path == "/sleep":
            model.sleep(int(query["level"][0]))
        elif url.path == "/wake_up":
            model.wake(set(query.get("tags", ("weights", "kv_cache"))))
        elif url.path == "/collective_rpc" and body["method"] == "cumem_sleep_status":
            return self.answer(200, {"results": [model.status()]})
        elif url.path == "/collective_rpc" and body["method"] == "fill_with_normal_values":
            assert arguments.worker_extension_cls == "worker_extension.Extension"
            return self.answer(200, {"results": [1 << 20]})
        elif url.path == ("/reload_weights" if arguments.middleware else "/collective_rpc"):
            assert arguments.middleware or body == {"method": "reload_weights"}
            model.reload()
        elif url.path == "/v1/completions":
            return self.complete(body)
        else:
            return self.answer(404)
        return self.answer(200)

    def complete(self, body: dict[str, Any]) -> None:
        if body["model"] != arguments.served_model_name or model.asleep:
            return self.answer(400, {"error": "not here"})
        assert body["stream"]
        assert body["return_token_ids"]
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for number in range(body["max_tokens"] - BROKEN.get("tokens_missing", 0)):
            choice = {"index": 0, "text": "", "token_ids": [model.token(body["prompt"], number)]}
            self.wfile.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")
        return None


def end(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not interrupt the clearing up
    sys.exit(0)


signal.signal(signal.SIGTERM, end)
server = ThreadingHTTPServer((arguments.host, arguments.port), Handler)
try:
    server.serve_forever()
finally:
    if not model.asleep:
        GPU.unlink()
