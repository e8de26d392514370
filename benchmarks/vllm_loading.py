"""How long does `vllm serve` take to load its weights and to answer: from files, and from a vault that kept them?

    python benchmarks/vllm_loading.py --out result.json                # 8B, about five minutes on an H200
    python benchmarks/vllm_loading.py --out result.json --shape 14B

A checkpoint with random weights is written to `--work`, and a server is started from it again and again:

    files_cold   vLLM's own loader; the files are not in the page cache
    files        the same; they are
    offers       `--load-format cumem_sleep`, of which the vault has nothing yet; page cache as before
    memory       the same; the vault has the weights in memory, the page cache has nothing of the files' pages
    offers_spilled, spilled    the same; other weights have taken the vault's memory meanwhile, so these are in files

torch.compile's and vLLM's own caches are filled by a start before. Greedy tokens have to be the same in all of them.
`steps` are the seconds that vLLM's log gives for the parts of a start. The link's ceiling is measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from checkpoints import SHAPES, is_written, write_checkpoint
from model_server import SERVE, Deadline, Server, exit_on_sigterm
from record import GIB, machine_apart, touch_host_memory
from vault_process import Vault

PROMPT = [(7919 * (j + 3)) % 150000 for j in range(64)]
TOKENS = 16
STEPS = {
    "weights from files": r"Loading weights took ([\d.]+) seconds",
    "weights adopted": r"cumem-sleep: adopted .* in ([\d.]+) s",
    "weights offered": r"cumem-sleep: offered .* in ([\d.]+) s",
    "model (build, load, process)": r"Model loading took .* and ([\d.]+) seconds",
    "torch.compile": r"torch\.compile took ([\d.]+) s in total",
    "graphs": r"Graph capturing finished in ([\d.]+) secs",
    "engine (profile, KV cache, warm-up)": r"init engine \(profile, create kv cache, warmup model\) took ([\d.]+) s",
}
FROM_VAULT = ("--load-format", "cumem_sleep")


def out_of_page_cache(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def into_page_cache(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb", buffering=0) as file:
            while file.read(64 << 20):
                pass


class Starts:
    """Starts of one model's server, one after the other."""

    def __init__(self, arguments: argparse.Namespace, folder: Path, logs: Path) -> None:
        self._arguments, self._folder, self._logs = arguments, folder, logs
        self._deadline = Deadline(arguments.deadline)
        self._tokens: list[Any] | None = None
        self.facts: dict[str, Any] = {}

    def start(
        self, name: str, options: tuple[str, ...] = (), vault: Vault | None = None, *, cold: bool = False
    ) -> None:
        """From its start to its first tokens, and its end."""
        if cold:
            out_of_page_cache(self._folder)
        else:
            into_page_cache(self._folder)
        command = [*SERVE, str(self._folder), "--skip-tokenizer-init", "--enable-sleep-mode", "--max-model-len", "4096"]
        command += ["--gpu-memory-utilization", "0.85", "--seed", "0", *options]
        environment = {"VLLM_CACHE_ROOT": str(self._arguments.work / "cache")}
        if vault is not None:
            environment["CUMEM_SLEEP_VAULT"] = vault.socket
        log = self._logs / f"loading_{name}.log"
        server = Server(name, command, self._arguments.port, environment, log, self._deadline)
        try:
            healthy_s = server.start(300)
            answer = server.complete(PROMPT, TOKENS)
        finally:
            stop_s = server.stop()
        text = log.read_text(errors="replace")
        steps = {step: float(found[1]) for step, words in STEPS.items() if (found := re.search(words, text))}
        self.facts[name] = {
            "command": command[1:],
            "page cache": "empty" if cold else "full",
            "start_s": healthy_s,
            "first_token_s": healthy_s + answer.first_token_s,
            "stop_s": stop_s,
            "steps": steps,
            "log of the layer": [line.split("] ", 1)[-1] for line in text.splitlines() if "cumem-sleep" in line][:12],
        }
        if self._tokens not in (None, answer.tokens):
            raise server.failure(f"other tokens: {answer.tokens} instead of {self._tokens}")
        self._tokens = answer.tokens
        wanted = {"offers": "offered", "memory": "adopted", "offers_spilled": "offered", "spilled": "adopted"}.get(name)
        if wanted and f"weights {wanted}" not in steps:
            raise server.failure(f"no weights were {wanted}")
        print(f"{name:16}{healthy_s:8.1f} s until it is healthy; {steps}", flush=True)


@contextmanager
def keeping(memory: int, weights: int, *options: str) -> Iterator[Vault]:
    """A vault that keeps this model's weights, and has all of its memory."""
    with Vault(memory, "--keep-weights", str(weights), *options) as vault:
        vault.wait_until_pinned()
        yield vault


def take_memory(vault: Vault, nbytes: int) -> int:
    """Have other weights sleep in the vault for a while; returns the bytes that are in its files afterwards."""
    program = f"""import torch
from cumem_sleep import CuMemAllocator
allocator = CuMemAllocator.get_instance()
with allocator.use_memory_pool("weights"):
    others = [torch.empty({GIB}, dtype=torch.uint8, device="cuda").random_() for _ in range({nbytes // GIB})]
allocator.sleep(level=1)"""
    environment = {**os.environ, "CUMEM_SLEEP_VAULT": vault.socket, "PYTHONSAFEPATH": "1"}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=180)
    return int(vault.status()["spilled_bytes"])


def link_s(nbytes: int) -> float:
    """Seconds for so many bytes from pinned memory to the GPU, in a process that ends: a context takes memory."""
    program = f"""import torch
h = torch.empty({GIB}, dtype=torch.uint8, pin_memory=True); d = torch.empty_like(h, device="cuda")
b, e = torch.cuda.Event(True), torch.cuda.Event(True)
d.copy_(h, non_blocking=True); b.record()
for _ in range(8): d.copy_(h, non_blocking=True)
e.record(); e.synchronize(); print(b.elapsed_time(e) / 8000)"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    return float(said.stdout) * nbytes / GIB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", choices=SHAPES, default="8B")
    parser.add_argument("--work", type=Path, default=Path("/tmp/vllm-loading"), help="folder for the checkpoint")
    parser.add_argument("--deadline", type=float, default=560, help="seconds that all of it may take")
    parser.add_argument("--port", type=int, default=8075)
    arguments = parser.parse_args()
    machine = machine_apart("vllm")
    exit_on_sigterm()
    shape, folder = SHAPES[arguments.shape], arguments.work / arguments.shape
    logs = arguments.out.parent / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    if not is_written(folder, shape, seed=1):
        write_checkpoint(folder, shape, seed=1)
    weights = int(shape.weights_bytes * 1.05)
    touch_host_memory(weights)
    starts = Starts(arguments, folder, logs)
    failed = ""
    spill = arguments.work / "spill"
    spill.mkdir(mode=0o700, exist_ok=True)
    try:
        starts.start("fills_caches")
        starts.start("files_cold", cold=True)
        starts.start("files")
        for kind, vault in (
            ("memory", keeping(weights + GIB, weights)),
            ("spilled", keeping(weights + GIB, weights, "--spill", str(spill), "--spill-size", str(weights + GIB))),
        ):
            with vault as of_run:
                starts.start("offers" if kind == "memory" else "offers_spilled", FROM_VAULT, of_run)
                if kind == "spilled":
                    starts.facts["bytes in files"] = take_memory(of_run, weights)
                starts.start(kind, FROM_VAULT, of_run, cold=True)
    except Exception as error:
        failed = f"{type(error).__name__}: {error}"
        print(f"FAILED {failed}")
    result = {
        "machine": machine,
        "shape": arguments.shape,
        "weights_bytes": shape.weights_bytes,
        "link_s": link_s(shape.weights_bytes),
        "starts": starts.facts,
        **({"error": failed} if failed else {}),
    }
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
