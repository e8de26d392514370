"""A Qwen3-8B-shaped decoder in plain PyTorch, its decode step in a CUDA graph, across sleep and wake.

    python benchmarks/decoder.py --out result.json --checkpoint /tmp/qwen3-8b

Random weights are written as safetensors first and loaded from the files into the pool. Logits of a greedy run must be
bit-identical before and after level 1, and after level 2 with the files loaded again; addresses must not change; what
stays on the GPU while the model sleeps is itemised.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from record import GIB, touch_host_memory, write
from safetensors import safe_open
from safetensors.torch import save_file

from cumem_sleep import CuMemAllocator

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCABULARY = 4096, 36, 32, 8, 128, 12288, 151936
POSITIONS = 8192
PROMPT = [3, 1415, 92653, 58979, 32384, 62643, 38327, 95028]
STEPS = 24


def layer_shapes() -> dict[str, tuple[int, ...]]:
    return {
        "input_norm": (HIDDEN,),
        "qkv": ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
        "q_norm": (HEAD_DIM,),
        "k_norm": (HEAD_DIM,),
        "o": (HIDDEN, HEADS * HEAD_DIM),
        "post_norm": (HIDDEN,),
        "gate_up": (2 * INTERMEDIATE, HIDDEN),
        "down": (HIDDEN, INTERMEDIATE),
    }


def write_checkpoint(folder: Path) -> None:
    """One file for each layer, one for the rest, random values of a trained model's size."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator("cuda").manual_seed(20)

    def values(shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16)
        return (torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16) * 0.02).cpu()

    outer = {"embed": (VOCABULARY, HIDDEN), "norm": (HIDDEN,), "head": (VOCABULARY, HIDDEN)}
    save_file({name: values(shape) for name, shape in outer.items()}, folder / "outer.safetensors")
    for layer in range(LAYERS):
        tensors = {f"{layer}.{name}": values(shape) for name, shape in layer_shapes().items()}
        save_file(tensors, folder / f"layer{layer:02d}.safetensors")


def load(folder: Path, into: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """Tensors of all files on the GPU: new ones, or written into those given."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118
                if into is None:
                    tensors[name] = file.get_tensor(name).to("cuda")
                else:
                    into[name].copy_(file.get_tensor(name))
    return into or tensors


class Decoder:
    """One token at a time, batch 1, static KV cache."""

    def __init__(self, weights: dict[str, torch.Tensor], cache: torch.Tensor) -> None:
        self.weights, self.cache = weights, cache
        self.token = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.position = torch.zeros(1, dtype=torch.int64, device="cuda")
        frequencies = 1e6 ** (-torch.arange(0, HEAD_DIM, 2, device="cuda", dtype=torch.float32) / HEAD_DIM)
        angles = torch.arange(POSITIONS, device="cuda", dtype=torch.float32)[:, None] * frequencies
        self.cos, self.sin = angles.cos(), angles.sin()
        self.numbers = torch.arange(POSITIONS, device="cuda")
        self.logits = torch.empty(1, VOCABULARY, device="cuda", dtype=torch.bfloat16)

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        cos, sin = self.cos[self.position], self.sin[self.position]
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)

    def step(self) -> None:
        w = self.weights
        x = w["embed"][self.token]
        mask = (self.numbers <= self.position)[None, None, None]
        for i in range(LAYERS):
            h = F.rms_norm(x, (HIDDEN,), w[f"{i}.input_norm"], 1e-6)
            q, k, v = F.linear(h, w[f"{i}.qkv"]).split([HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM], -1)
            q = self.rotate(F.rms_norm(q.view(HEADS, HEAD_DIM), (HEAD_DIM,), w[f"{i}.q_norm"], 1e-6))
            k = self.rotate(F.rms_norm(k.view(KV_HEADS, HEAD_DIM), (HEAD_DIM,), w[f"{i}.k_norm"], 1e-6))
            keys, values = self.cache[i]
            keys.index_copy_(1, self.position, k[:, None])
            values.index_copy_(1, self.position, v.view(KV_HEADS, 1, HEAD_DIM))
            attended = F.scaled_dot_product_attention(
                q[None, :, None], keys[None], values[None], attn_mask=mask, enable_gqa=True
            )
            x = x + F.linear(attended.reshape(1, HEADS * HEAD_DIM), w[f"{i}.o"])
            h = F.rms_norm(x, (HIDDEN,), w[f"{i}.post_norm"], 1e-6)
            gate, up = F.linear(h, w[f"{i}.gate_up"]).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, w[f"{i}.down"])
        self.logits.copy_(F.linear(F.rms_norm(x, (HIDDEN,), w["norm"], 1e-6), w["head"]))


def generate(decoder: Decoder, graph: torch.cuda.CUDAGraph) -> tuple[list[int], str]:
    """Greedy tokens after the prompt, and the hash of every step's logits."""
    decoder.cache.zero_()  # dropped at sleep: a server would have freed its blocks
    tokens = list(PROMPT)
    digest = hashlib.sha256()
    for position in range(len(PROMPT) + STEPS):
        decoder.token.fill_(tokens[position])
        decoder.position.fill_(position)
        graph.replay()
        digest.update(decoder.logits.view(torch.int16).cpu().numpy().tobytes())
        if position + 1 >= len(tokens):
            tokens.append(int(decoder.logits.argmax()))
    return tokens[len(PROMPT) :], digest.hexdigest()


def bare_context_bytes() -> int:
    """Device memory of a process that has a context and nothing else."""
    program = (
        "import ctypes; cuda = ctypes.CDLL('libcuda.so.1'); cuda.cuInit(0); c = ctypes.c_void_p();"
        "free = ctypes.c_size_t(); total = ctypes.c_size_t(); cuda.cuDevicePrimaryCtxRetain(ctypes.byref(c), 0);"
        "cuda.cuCtxSetCurrent(c); cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total));"
        "print(total.value - free.value)"
    )
    return int(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout)


def in_use_bytes() -> int:
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the raw result goes (JSON)")
    parser.add_argument("--checkpoint", type=Path, required=True, help="folder for the safetensors files (16 GB)")
    arguments = parser.parse_args()

    bare_context = bare_context_bytes()
    start = time.perf_counter()
    write_checkpoint(arguments.checkpoint)
    torch.cuda.empty_cache()
    print(f"checkpoint written in {time.perf_counter() - start:.1f} s", file=sys.stderr)

    touch_host_memory(48 * GIB)
    allocator = CuMemAllocator.get_instance()
    start = time.perf_counter()
    with allocator.use_memory_pool("weights"):
        weights = load(arguments.checkpoint)
    load_s = time.perf_counter() - start
    with allocator.use_memory_pool("kv_cache"):
        cache = torch.zeros(LAYERS, 2, KV_HEADS, POSITIONS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        more_cache = torch.zeros(40 * GIB, dtype=torch.uint8, device="cuda")
    with allocator.use_memory_pool("runtime"):  # constants and cuBLAS workspaces: small, and they can sleep too
        decoder = Decoder(weights, cache)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                decoder.step()
        torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with allocator.cudagraph_pool() as pool, torch.cuda.graph(graph, pool=pool):
        decoder.step()

    addresses = {name: tensor.data_ptr() for name, tensor in weights.items()}
    expected = generate(decoder, graph)
    usage_awake = {tag: vars(usage) for tag, usage in allocator.usage().items()}
    runs: list[dict[str, Any]] = []
    for name, level in (
        ("level 1, first", 1),
        ("level 1, again", 1),
        ("level 2, files loaded again", 2),
        ("level 1", 1),
    ):
        awake_bytes = in_use_bytes()
        slept = allocator.sleep(level)
        gc.collect()
        asleep_bytes = in_use_bytes()
        mapped_asleep = sum(usage.mapped_bytes for usage in allocator.usage().values())
        outside = torch.cuda.memory_reserved() - allocator.get_current_usage()
        woken = allocator.wake_up()
        start = time.perf_counter()
        if level == 2:
            load(arguments.checkpoint, into=weights)
            torch.cuda.synchronize()
        reload_s = time.perf_counter() - start if level == 2 else None
        actual = generate(decoder, graph)
        run = {
            "run": name,
            "sleep": {k: v for k, v in vars(slept).items() if k != "note"},
            "wake": {k: v for k, v in vars(woken).items() if k != "note"},
            "reload_s": reload_s,
            "gpu_bytes_awake": awake_bytes,
            "gpu_bytes_asleep": asleep_bytes,
            "asleep_itemised": {
                "bare CUDA context": bare_context,
                "PyTorch's memory outside the layer": outside,
                "segments of the layer": mapped_asleep,
                "loaded kernels, graph and the rest of the context": asleep_bytes
                - bare_context
                - outside
                - mapped_asleep,
            },
            "tokens_identical": actual[0] == expected[0],
            "logits_bit_identical": actual[1] == expected[1],
            "addresses_identical": addresses == {name: tensor.data_ptr() for name, tensor in weights.items()},
        }
        runs.append(run)
        print(
            f"{name:28} sleep {slept.seconds:.3f} s  wake {woken.seconds:.3f} s  asleep {asleep_bytes / GIB:.3f} GiB"
            f"  logits identical {run['logits_bit_identical']}  addresses identical {run['addresses_identical']}"
        )
    write(
        arguments.out,
        {
            "load_s": load_s,
            "tokens": expected[0],
            "logits_sha256": expected[1],
            "usage_awake": usage_awake,
            "runs": runs,
        },
    )
    print(json.dumps({k: round(v / GIB, 3) for k, v in runs[0]["asleep_itemised"].items()}))
    del more_cache
    bad = [run["run"] for run in runs if not (run["logits_bit_identical"] and run["addresses_identical"])]
    if bad:
        raise SystemExit(f"differs: {bad}")


if __name__ == "__main__":
    main()
