"""`benchmarks/llama_cpp_servers.py` with a server that only answers: both models in turns, behind the real front."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

import cumem_sleep

pytest.importorskip("numpy")

BENCHMARK = pathlib.Path(__file__).resolve().parents[2] / "benchmarks" / "llama_cpp_servers.py"
pytestmark = [pytest.mark.sim, pytest.mark.slow]

SERVER = """
import http.server, json, os, sys

given = dict(zip(sys.argv[1::2], sys.argv[2::2]))

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({"data": []})
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer({"choices": [{"text": open(given["--model"]).read() + os.environ.get("MORE", "") * os.getpid()}]})
    def answer(self, content):
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

http.server.ThreadingHTTPServer((given["--host"], int(given["--port"])), Handler).serve_forever()
"""
GGUF = """
class GGUFWriter:
    def __init__(self, path, architecture):
        open(path, "w").write(path)
    def __getattr__(self, name):
        return lambda *_: None
"""


def run(folder: pathlib.Path, **variables: str) -> subprocess.CompletedProcess[str]:
    (folder / "llama_cpp" / "server").mkdir(parents=True)
    (folder / "llama_cpp" / "server" / "__main__.py").write_text(SERVER)
    (folder / "gguf.py").write_text(GGUF)
    path = os.pathsep.join([str(folder), str(pathlib.Path(cumem_sleep.__path__[0]).parent)])
    return subprocess.run(
        [sys.executable, str(BENCHMARK), "--out", str(folder / "out.json"), "--rounds", "2"],
        env={**os.environ, "PYTHONPATH": path, **variables},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_both_models_answer_in_turns(tmp_path: pathlib.Path) -> None:
    process = run(tmp_path)
    assert process.returncode == 0, process.stdout + process.stderr
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(row["model"], row["says"].endswith(f"{row['model']}.gguf")) for row in rows] == [
        *(("one", True), ("two", True)),
        *(("one", True), ("two", True)),
    ]


def test_a_model_that_says_something_else_after_its_restart_is_named(tmp_path: pathlib.Path) -> None:
    process = run(tmp_path, MORE="!")
    assert process.returncode == 1
    assert "one does not say the same again" in process.stderr
