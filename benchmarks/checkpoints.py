"""Checkpoints of Qwen3's shapes with random bf16 weights, for model servers that have no network to load a model from.

Safetensors files, one for each decoder layer and one for the rest, with the names that transformers and vLLM expect,
and `config.json`. Weights are normal with Qwen3's initial deviation, norms are ones: greedy tokens of such a
model are as varied as its prompts, and differ from seed to seed. Values are made on the GPU where there is one.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

HEAD_DIM = 128
VOCABULARY = 151936
STANDARD_DEVIATION = 0.02
INDEX = "model.safetensors.index.json"
THREADS = 8

Shard = dict[str, tuple[int, ...]]  # shapes by name of tensor


@dataclass(frozen=True)
class Shape:
    """What a Qwen3's size is made of."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    tied: bool = False
    vocabulary: int = VOCABULARY
    window: int = 0

    def shards(self) -> dict[str, Shard]:
        """What each file holds."""
        shards = {f"model-layer{number:02d}.safetensors": self._layer(number) for number in range(self.layers)}
        outer: Shard = {
            "model.embed_tokens.weight": (self.vocabulary, self.hidden),
            "model.norm.weight": (self.hidden,),
        }
        if not self.tied:
            outer["lm_head.weight"] = (self.vocabulary, self.hidden)
        return {"model-outer.safetensors": outer, **shards}

    @property
    def weights_bytes(self) -> int:
        return sum(2 * prod(shape) for shard in self.shards().values() for shape in shard.values())

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "head_dim": HEAD_DIM,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "initializer_range": STANDARD_DEVIATION,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": 40960,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000,
            "tie_word_embeddings": self.tied,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "vocab_size": self.vocabulary,
            **(self._config_of_windows() if self.window else {}),
        }

    def _config_of_windows(self) -> dict[str, Any]:
        """Gemma 3's: five layers of six attend to a window. For dummy weights, since those of `shards` are Qwen3's."""
        kinds = ["full_attention" if number % 6 == 5 else "sliding_attention" for number in range(self.layers)]
        return {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "hidden_activation": "gelu_pytorch_tanh",
            "layer_types": kinds,
            "query_pre_attn_scalar": HEAD_DIM,
            "rope_local_base_freq": 10000.0,
            "sliding_window": self.window,
        }

    def _layer(self, number: int) -> Shard:
        layer = f"model.layers.{number}"
        return {
            f"{layer}.input_layernorm.weight": (self.hidden,),
            f"{layer}.self_attn.q_proj.weight": (self.heads * HEAD_DIM, self.hidden),
            f"{layer}.self_attn.k_proj.weight": (self.kv_heads * HEAD_DIM, self.hidden),
            f"{layer}.self_attn.v_proj.weight": (self.kv_heads * HEAD_DIM, self.hidden),
            f"{layer}.self_attn.q_norm.weight": (HEAD_DIM,),
            f"{layer}.self_attn.k_norm.weight": (HEAD_DIM,),
            f"{layer}.self_attn.o_proj.weight": (self.hidden, self.heads * HEAD_DIM),
            f"{layer}.post_attention_layernorm.weight": (self.hidden,),
            f"{layer}.mlp.gate_proj.weight": (self.intermediate, self.hidden),
            f"{layer}.mlp.up_proj.weight": (self.intermediate, self.hidden),
            f"{layer}.mlp.down_proj.weight": (self.hidden, self.intermediate),
        }


SHAPES = {
    "0.6B": Shape(1024, 28, 16, 8, 3072, tied=True),
    "8B": Shape(4096, 36, 32, 8, 12288),
    "14B": Shape(5120, 40, 40, 8, 17408),
    "32B": Shape(5120, 64, 64, 8, 25600),
    "windows": Shape(2560, 36, 8, 4, 10240, tied=True, window=1024),  # about Gemma 3 4B's
}


def write_config(folder: Path, shape: Shape) -> None:
    """All that a server with dummy weights needs."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape.config(), indent=2) + "\n")


def is_written(folder: Path, shape: Shape, seed: int) -> bool:
    """Whether the folder already holds this checkpoint; the index is written last."""
    try:
        index = json.loads((folder / INDEX).read_text())
        config = json.loads((folder / "config.json").read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return False
    return bool(index["metadata"].get("seed") == seed and config == shape.config())


def write_checkpoint(folder: Path, shape: Shape, seed: int) -> None:
    """Files are made and written by several threads: one alone is slower than the page cache."""
    import torch

    (folder / INDEX).unlink(missing_ok=True)
    write_config(folder, shape)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shards = shape.shards()

    def write_file(number: int, name: str) -> None:
        generator = torch.Generator(device).manual_seed(seed * len(shards) + number)
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for tensor, sizes in shards[name].items():
            start, end = end, end + 2 * prod(sizes)
            header[tensor] = {"dtype": "BF16", "shape": sizes, "data_offsets": [start, end]}
        encoded = json.dumps(header).encode()
        encoded += b" " * (-len(encoded) % 8)
        with (folder / name).open("wb", buffering=0) as file:
            file.write(len(encoded).to_bytes(8, "little") + encoded)
            for sizes in shards[name].values():
                values = torch.ones(sizes, dtype=torch.bfloat16, device=device)
                if len(sizes) > 1:
                    values.normal_(0.0, STANDARD_DEVIATION, generator=generator)
                left = memoryview(values.cpu().view(torch.uint8).numpy()).cast("B")  # type: ignore[arg-type]
                while left:  # one call of the system writes 2 GiB at most
                    left = left[file.write(left) :]

    with ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(write_file, number, name) for number, name in enumerate(shards)]:
            done.result()
    if device == "cuda":
        torch.cuda.empty_cache()  # this process may outlive the file, beside engines whose memory is looked at
    index = {
        "metadata": {"total_size": shape.weights_bytes, "seed": seed},
        "weight_map": {tensor: name for name, shard in shards.items() for tensor in shard},
    }
    (folder / INDEX).write_text(json.dumps(index) + "\n")
