"""Where the weights come from: the files of a model, or a small random one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..safetensors import Tensor, read_tensors


@dataclass(frozen=True)
class Source:
    """The weights, which must be the same after every wake."""

    description: str
    tensors: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        """The size of all tensors."""
        return sum(tensor.data.size for tensor in self.tensors)

    @property
    def dtypes(self) -> list[str]:
        """Every dtype that occurs, sorted."""
        return sorted({tensor.dtype for tensor in self.tensors})


def source_from_files(paths: Sequence[Path]) -> Source:
    """The tensors of safetensors files, or of folders of them.

    Raises:
        SafetensorsError: a file cannot be read, is not in the format, or none of them holds a tensor.
    """
    return Source(", ".join(path.name or path.resolve().name for path in paths), read_tensors(paths))


def synthetic_source(layers: int = 6, hidden: int = 1024, vocabulary: int = 32768, seed: int = 0) -> Source:
    """A transformer in bf16 with normally distributed weights: 193 MiB by default, always the same bytes."""
    ffn, kv = hidden * 11 // 4, hidden // 4
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }
    shapes = {"model.embed_tokens.weight": (vocabulary, hidden), "model.norm.weight": (hidden,)}
    shapes |= {f"model.layers.{n}.{name}.weight": shape for n in range(layers) for name, shape in layer.items()}
    random = np.random.default_rng(seed)
    tensors = []
    for name, shape in shapes.items():
        floats = random.standard_normal(math.prod(shape), dtype=np.float32)
        bf16 = (floats.view(np.uint32) >> np.uint32(16)).astype("<u2")  # bf16 is the upper half of a float32
        tensors.append(Tensor(name, "BF16", shape, bf16.view(np.uint8)))
    return Source("a small transformer with random weights", tuple(tensors))
