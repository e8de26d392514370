"""Triton behind a front, with OpenAI's API before it: python triton_server.py PORT TRITON_PORT (docs/frameworks.md)."""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
from pytriton.client import ModelClient
from pytriton.decorators import batch
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

port, triton_port = map(int, sys.argv[1:])
TEXT = Tensor(name="text", dtype=bytes, shape=(1,))


@batch
def infer(text):  # your model
    return {"said": np.char.add(b"Triton heard ", text.astype("S"))}


class OpenAI(BaseHTTPRequestHandler):
    def do_GET(self):  # /v1/models, also its health check
        self.answer({"object": "list", "data": [{"id": "triton", "object": "model"}]})

    def do_POST(self):  # /v1/completions
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with ModelClient(f"http://127.0.0.1:{triton_port}", "model") as client:
            (said,) = client.infer_sample(np.array([asked["prompt"].encode()]))["said"]
        choice = {"index": 0, "text": said.decode(), "finish_reason": "stop"}
        self.answer({"object": "text_completion", "model": "triton", "choices": [choice]})

    def answer(self, body):
        content = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


config = TritonConfig(http_address="127.0.0.1", http_port=triton_port, allow_grpc=False, allow_metrics=False)
with Triton(config=config) as triton:
    said = Tensor(name="said", dtype=bytes, shape=(1,))
    triton.bind("model", infer, inputs=[TEXT], outputs=[said], config=ModelConfig(max_batch_size=8))
    triton.run()
    ThreadingHTTPServer(("127.0.0.1", port), OpenAI).serve_forever()
