"""What else of a model survives a sleep: quantised weights, adapters, a draft model, weights that are replaced."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

from .engines import IN_PROCESS, allocator, cycle, cycles_keep_tokens, engine, model_of, tokens
from .registry import Facts, check, scenario


@scenario(**IN_PROCESS)
def fp8_weights(folder: Path) -> Facts:
    """Quantised while they are loaded, and again by a reload."""
    facts: Facts = {}
    llm = engine(folder, quantization="fp8")
    import torch

    check("weights are fp8", any(p.dtype == torch.float8_e4m3fn for p in model_of(llm).parameters()))
    cycles_keep_tokens(llm, facts)
    return facts


@scenario(**IN_PROCESS)
def fp8_kv_cache(folder: Path) -> Facts:
    """With its scales."""
    facts: Facts = {}
    llm = engine(folder, kv_cache_dtype="fp8")
    cycles_keep_tokens(llm, facts)
    return facts


@scenario(**IN_PROCESS)
def lora(folder: Path) -> Facts:
    """The adapter's tokens stay the same."""
    from vllm.lora.request import LoRARequest

    adapter = folder.parent / "adapter"
    write_adapter(folder, adapter)
    facts: Facts = {}
    llm = engine(folder, enable_lora=True, max_lora_rank=8)
    request = LoRARequest("adapter", 1, str(adapter))
    plain, adapted = tokens(llm), tokens(llm, lora_request=request)
    check("the adapter changes the tokens", plain != adapted)
    llm.reset_prefix_cache()
    facts["tokens without a sleep between repeat"] = tokens(llm, lora_request=request) == adapted
    stacked = _stacked_adapters(llm)
    check("there are adapters", stacked)
    for number in range(2):
        cycle(llm, facts, selective=number == 1)
        check("bytes of the adapters", _stacked_adapters(llm) == stacked)
        check("tokens without the adapter", tokens(llm) == plain)
        again = tokens(llm, lora_request=request)
        check("tokens with it", again == adapted or not facts["tokens without a sleep between repeat"])
        facts["tokens that are the same"] = sum(
            a == b for x, y in zip(again, adapted, strict=True) for a, b in zip(x, y, strict=True)
        )
    return facts


def _stacked_adapters(llm: Any) -> dict[str, int]:
    """A checksum of every tensor that holds adapters."""
    import torch

    sums = {}
    for name, module in model_of(llm).named_modules():
        for attribute in ("lora_a_stacked", "lora_b_stacked"):
            for number, tensor in enumerate(getattr(module, attribute, ())):
                sums[f"{name}.{attribute}.{number}"] = int(tensor.contiguous().view(torch.int16).long().sum())
    return sums


def write_adapter(folder: Path, adapter: Path) -> None:
    import torch
    from safetensors.torch import save_file

    config = json.loads((folder / "config.json").read_text())
    hidden, heads, kv_heads = (config[k] for k in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    generator = torch.Generator().manual_seed(5)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, size in (("q_proj", heads * 128), ("v_proj", kv_heads * 128)):
            path = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{path}.lora_A.weight"] = torch.randn(8, hidden, generator=generator, dtype=torch.bfloat16) * 0.05
            weights[f"{path}.lora_B.weight"] = torch.randn(size, 8, generator=generator, dtype=torch.bfloat16) * 0.05
    adapter.mkdir(exist_ok=True)
    save_file(weights, adapter / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (adapter / "adapter_config.json").write_text(json.dumps(described))


@scenario(**IN_PROCESS)
def draft_model(folder: Path) -> Facts:
    """Speculative decoding; the draft's weights sleep as well."""
    facts: Facts = {}
    speculative = {"model": str(folder), "method": "draft_model", "num_speculative_tokens": 3}
    llm = engine(folder, speculative_config=speculative)
    before = tokens(llm)
    for number in range(2):
        cycle(llm, facts, selective=number == 1)
        check("tokens after level 1", tokens(llm) == before)
    return facts


@scenario(**IN_PROCESS)
def weights_updated_while_kv_cache_sleeps(folder: Path) -> Facts:
    """As in reinforcement learning, at level 2."""
    other = folder.parent / "other"
    facts: Facts = {}
    llm = engine(other)
    wanted = tokens(llm)
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    llm = engine(folder)
    check("other weights, other tokens", tokens(llm) != wanted)
    for level in (2, 1):
        llm.sleep(level=level)
        llm.wake_up(tags=["weights"])
        check("the KV cache sleeps", allocator().usage()["kv_cache"].asleep_segments)
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(other)})
        llm.wake_up(tags=["kv_cache"])
        check(f"tokens of the new weights, level {level}", tokens(llm) == wanted)
    cycle(llm, facts)
    check("and after a sleep at level 1", tokens(llm) == wanted)
    return facts
