"""Two servers of llama-cpp-python behind `cumem-sleep serve`, by `engine: command`: what does a switch take?

    pip install 'llama-cpp-python[server]' gguf        # compiles llama.cpp: minutes
    python benchmarks/llama_cpp_servers.py --out llama_cpp_servers.json

On a CPU, with two tiny models that it makes itself. A switch is a stop of one server and a start of the other. Each
model must say the same every time. Not in CI, where the compilation would cost minutes; its test has a server that only
answers.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from ending import end
from record import machine_without_gpu

NAMES = ("one", "two")
WIDTH, HEADS, INNER, LAYERS = 64, 4, 128, 2
TOKENS = [b"<unk>", b"<s>", b"</s>", *(f"<0x{byte:02X}>".encode() for byte in range(256)), "▁".encode(), b"a", b"b"]
TOKEN_TYPES = [2, 3, 3, *[6] * 256, 1, 1, 1]  # unknown, control, bytes, normal, as llama.cpp numbers them
READY_S, END_S = 60.0, 30.0


def write_model(path: Path, seed: int) -> None:
    """A llama with random weights and a vocabulary of bytes, as GGUF."""
    import gguf
    import numpy as np

    random = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_file_type(0)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(TOKENS)
    writer.add_token_scores([0.0] * len(TOKENS))
    writer.add_token_types(TOKEN_TYPES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)

    def add(name: str, *sizes: int) -> None:
        values = random.standard_normal(sizes) * 0.05 if len(sizes) > 1 else np.ones(sizes)
        writer.add_tensor(f"{name}.weight", values.astype(np.float32))

    add("token_embd", len(TOKENS), WIDTH)
    add("output", len(TOKENS), WIDTH)
    add("output_norm", WIDTH)
    for layer in range(LAYERS):
        for name in ("attn_norm", "ffn_norm"):
            add(f"blk.{layer}.{name}", WIDTH)
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"blk.{layer}.{name}", WIDTH, WIDTH)
        add(f"blk.{layer}.ffn_gate", INNER, WIDTH)
        add(f"blk.{layer}.ffn_up", INNER, WIDTH)
        add(f"blk.{layer}.ffn_down", WIDTH, INNER)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_config(folder: Path, port: int) -> Path:
    """The front's, which is YAML, as JSON is."""
    models = {}
    for number, name in enumerate(NAMES):
        write_model(folder / f"{name}.gguf", number)
        server = [sys.executable, "-m", "llama_cpp.server", "--model", str(folder / f"{name}.gguf"), "--n_ctx", "128"]
        command = f"{shlex.join(server)} --host 127.0.0.1 --port {{port}}"
        models[name] = {"engine": "command", "command": command, "health": "/v1/models"}
    file = folder / "models.yaml"
    file.write_text(json.dumps({"front": {"port": port}, "logs": str(folder / "logs"), "models": models}))
    return file


def ask(port: int, model: str, tokens: int) -> tuple[float, str]:
    """The seconds until it is answered, and the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=READY_S)
    body = {"model": model, "prompt": "a b a b", "max_tokens": tokens, "temperature": 0}
    start = time.perf_counter()
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        content = response.read()
    finally:
        connection.close()
    if response.status != http.HTTPStatus.OK:
        raise SystemExit(f"{model}: {response.status} {content.decode(errors='replace')[:500]}")
    return time.perf_counter() - start, str(json.loads(content)["choices"][0]["text"])


def wait_for(port: int, front: subprocess.Popen[bytes]) -> None:
    ends_at = time.monotonic() + READY_S
    while front.poll() is None and time.monotonic() < ends_at:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise SystemExit("the front does not listen")


def measure(port: int, rounds: int) -> list[dict[str, Any]]:
    """The models in turns: the first request of each starts its server, the second finds it running."""
    rows: list[dict[str, Any]] = []
    for number in range(rounds):
        for name in NAMES:
            switch_s, said = ask(port, name, 8)
            awake_s, again = ask(port, name, 8)
            rows.append({"round": number, "model": name, "switch_s": switch_s, "awake_s": awake_s, "says": said})
            if {said, again} != {row["says"] for row in rows if row["model"] == name}:
                raise SystemExit(f"{name} does not say the same again: {said!r}, {again!r}")
            print(f"{name}: {switch_s:.2f} s with a switch, {awake_s:.3f} s without", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the raw result goes (JSON)")
    parser.add_argument("--rounds", type=int, default=4, help="of both models (default: %(default)s)")
    arguments = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    with tempfile.TemporaryDirectory() as folder:
        config = write_config(Path(folder), port)
        environment = {**os.environ, "PYTHONSAFEPATH": "1"}
        front = subprocess.Popen([sys.executable, "-m", "cumem_sleep", "serve", str(config)], env=environment)
        try:
            wait_for(port, front)
            rows = measure(port, arguments.rounds)
        finally:
            end(front, END_S)
    medians = {name: median(row[name] for row in rows[1:]) for name in ("switch_s", "awake_s")}
    result = {"machine": machine_without_gpu(), "medians": medians, "rows": rows}
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"a switch takes {medians['switch_s']:.2f} s, an answer without one {medians['awake_s']:.3f} s")


if __name__ == "__main__":
    main()
