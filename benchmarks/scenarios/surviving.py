"""What survives a sleep: every block of memory in use, compared byte by byte, at level 1 and after level 2 with a load.

Left out are the KV cache's tensors. Whatever PyTorch counts as in use in this layer's memory is read before the sleep
and after the wake (and, at level 2, after the weights were loaded again), also what no tensor of Python's holds. Freed
memory is overwritten meanwhile. The load is made once without a sleep before: what it leaves is what is compared.
"""

from __future__ import annotations

import contextlib
import gc
import json
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from .engines import IN_PROCESS, engine, tokens
from .registry import Facts, check, scenario, timed

_IN_WORKERS = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}  # functions are sent to them
_SCRIBBLED_BYTES = 6 << 30  # more than one of these engines releases
_noted: dict[int, tuple[Any, str]] = {}  # in a worker: the bytes at an address, and what is there
_saved: dict[str, Any] = {}  # in a worker: parameters


# In the workers


def note(worker: Any) -> dict[str, int]:
    """Remember what is in use, and say how much that is."""
    import torch

    torch.cuda.synchronize()
    gc.unfreeze()  # vLLM keeps the collector from what it has made, and so from telling
    names = dict(_live_tensors())
    left_out = _kv_cache(worker)
    _noted.clear()
    for address, nbytes in _blocks_in_use():
        if address not in left_out:
            _noted[address] = _bytes_at(address, nbytes).cpu(), names.get(address, "no tensor of Python's")
    beside = [content.numel() for content, _ in _noted.values()]
    return {"blocks": len(beside), "bytes": sum(beside)}


def differing(_: Any) -> list[str]:
    """What of it holds other bytes now."""
    import torch

    torch.cuda.synchronize()
    in_use = dict(_blocks_in_use())
    return [
        f"{name} ({content.numel()} bytes)"
        for address, (content, name) in _noted.items()
        if in_use.get(address) == content.numel()
        and not torch.equal(_bytes_at(address, content.numel()).cpu(), content)
    ]


def scribble(_: Any) -> None:
    """Take memory that is free now, write to all of it, and give it back."""
    import torch

    free = torch.cuda.mem_get_info()[0] - (1 << 30)
    taken = [
        torch.randint(-(1 << 62), 1 << 62, (1 << 26,), device="cuda")
        for _ in range(min(free, _SCRIBBLED_BYTES) // (512 << 20))
    ]
    torch.cuda.synchronize()
    taken.clear()
    torch.cuda.empty_cache()


def save_parameters(worker: Any) -> None:
    _saved.update((name, each.detach().cpu().clone()) for name, each in _parameters(worker))


def write_parameters(worker: Any) -> None:
    """As a trainer does that writes in place."""
    import torch

    with torch.no_grad():
        for name, each in _parameters(worker):
            each.copy_(_saved[name])
    torch.cuda.synchronize()


def load_in_place(worker: Any, folder: str) -> None:
    """The checkpoint through the model's own `load_weights`, as trainers call it: nothing is processed afterwards."""
    from safetensors.torch import load_file

    files = sorted(Path(folder).glob("*.safetensors"))
    weights = ((name, each.cuda()) for file in files for name, each in load_file(file).items())
    worker.model_runner.model.load_weights(weights)


def _parameters(worker: Any) -> Iterator[tuple[str, Any]]:
    yield from worker.model_runner.model.named_parameters()
    draft = worker.get_draft_model() if hasattr(worker, "get_draft_model") else None
    if draft is not None:
        yield from ((f"draft.{name}", each) for name, each in draft.named_parameters())


def _live_tensors() -> Iterator[tuple[int, str]]:
    """Where the storages of Python's tensors are, and what they are."""
    import torch

    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor) and each.is_cuda:
            with contextlib.suppress(RuntimeError):  # those of a compiler have no memory
                yield (
                    each.untyped_storage().data_ptr(),
                    f"{type(each).__name__} {tuple(each.shape)} {each.dtype}",
                )


def _kv_cache(worker: Any) -> set[int]:
    """Where the tensors of the KV cache are."""
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    found, rest = set(), [worker.model_runner.kv_caches, *(getattr(layer, "kv_cache", ()) for layer in layers)]
    while rest:
        each = rest.pop()
        if hasattr(each, "untyped_storage"):
            found.add(each.untyped_storage().data_ptr())
        else:
            rest += each.values() if isinstance(each, dict) else each or ()
    return found


def _blocks_in_use() -> list[tuple[int, int]]:
    """Address and bytes of each block of this layer's memory that PyTorch counts as in use, and of other segments."""
    import torch

    from cumem_sleep import _core

    ours = {segment.address: segment.bytes for segment in _core.segments()}
    blocks = []
    for segment in torch.cuda.memory_snapshot():
        if ours.pop(segment["address"], 0):
            blocks += [
                (block["address"], block["requested_size"])
                for block in segment["blocks"]
                if block["state"] != "inactive" and block["requested_size"]
            ]
    return blocks + list(ours.items())


def _bytes_at(address: int, nbytes: int) -> Any:
    import torch

    described = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}
    return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=described), device="cuda")


# From outside


def _rpc(llm: Any, function: Callable[..., Any], *args: Any) -> Any:
    """The answers of all workers, which lists or texts are joined of."""
    return llm.collective_rpc(function, args=args)


def _survive(llm: Any, facts: Facts, load: Callable[[], Any], say: Callable[[], Any]) -> None:
    """Sleeps and wakes at both levels; nothing may differ, in memory or in what the model says."""
    load()
    llm.reset_prefix_cache()
    before = say()
    for level in (1, 2):
        facts[f"level {level} compared"] = _rpc(llm, note)
        llm.sleep(level=level)
        _rpc(llm, scribble)
        if level == 1:
            llm.wake_up()
        else:
            llm.wake_up(tags=["weights"])
            load()
            llm.wake_up(tags=["kv_cache"])
        found = facts[f"level {level} differ"] = [name for names in _rpc(llm, differing) for name in names]
        llm.reset_prefix_cache()
        facts[f"level {level} says the same"] = say() == before
        facts[f"level {level} not loaded"] = [
            status["not_loaded"] for status in llm.collective_rpc("cumem_sleep_status")
        ]
        check(f"level {level}: {len(found)} differ: {found[:5]}", not found)
        check(f"level {level}: what it says", facts[f"level {level} says the same"])


def _reloads(llm: Any) -> Callable[[], Any]:
    return lambda: llm.collective_rpc("reload_weights")


@scenario(**IN_PROCESS)
def survives_dense(folder: Path) -> Facts:
    """Every byte beside the KV cache, with CUDA graphs captured."""
    facts: Facts = {}
    llm = engine(folder, enforce_eager=False)
    _survive(llm, facts, _reloads(llm), lambda: tokens(llm))
    return facts


@scenario(**IN_PROCESS)
def survives_lora(folder: Path) -> Facts:
    """An adapter that is loaded stays loaded, and says the same at once after a load of the base model."""
    from vllm.lora.request import LoRARequest

    adapter = folder.parent / "surviving-adapter"
    _write_adapter(folder, adapter)
    facts: Facts = {}
    llm = engine(folder, enable_lora=True, max_lora_rank=8)
    request = LoRARequest("adapter", 1, str(adapter))
    plain, adapted = tokens(llm), tokens(llm, lora_request=request)
    check("the adapter changes the tokens", plain != adapted)
    llm.collective_rpc(save_parameters)
    # vLLM's reload reads a checkpoint into layers that carry adapters in versions that can; a trainer's way always can.
    _survive(llm, facts, lambda: llm.collective_rpc(write_parameters), lambda: tokens(llm, lora_request=request))
    return facts


def _write_adapter(folder: Path, adapter: Path) -> None:
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
def survives_draft_model(folder: Path) -> Facts:
    """The target is loaded again from its checkpoint, the draft is written in place."""
    speculative = {"model": str(folder), "method": "draft_model", "num_speculative_tokens": 3}
    facts: Facts = {}
    llm = engine(folder, speculative_config=speculative)
    llm.collective_rpc(save_parameters)
    _survive(llm, facts, lambda: llm.collective_rpc(write_parameters), lambda: tokens(llm))
    return facts


@scenario(**IN_PROCESS)
def survives_ngram(folder: Path) -> Facts:
    """Speculation from the prompt, which has state of its own on the GPU."""
    speculative = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    facts: Facts = {}
    llm = engine(folder, speculative_config=speculative)
    _survive(llm, facts, _reloads(llm), lambda: tokens(llm))
    return facts


@scenario(**IN_PROCESS)
def survives_hybrid(folder: Path) -> Facts:
    """State-space layers beside attention (Falcon H1's), with dummy weights that are written in place."""
    shape = folder.parent / "falcon-h1"
    shape.mkdir(exist_ok=True)
    config = {
        "architectures": ["FalconH1ForCausalLM"],
        "model_type": "falcon_h1",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 6,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "mamba_d_ssm": 2048,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_n_heads": 32,
        "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
    }
    (shape / "config.json").write_text(json.dumps(config))
    facts: Facts = {}
    llm = engine(shape, load_format="dummy", kv_cache_memory_bytes=1 << 30)
    llm.collective_rpc(save_parameters)
    _survive(llm, facts, lambda: llm.collective_rpc(write_parameters), lambda: _greedy(llm))
    return facts


def _greedy(llm: Any) -> list[list[int]]:
    """As `tokens`, of dummy weights, which may say the same to different prompts."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": [(7 * i + 13 * k) % 150000 for i in range(64)]} for k in range(3)]
    return [list(llm.generate([each], greedy, use_tqdm=False)[0].outputs[0].token_ids) for each in prompts]


@scenario(gpus=2, **_IN_WORKERS)
def survives_tensor_parallel(folder: Path) -> Facts:
    """On each of two ranks."""
    facts: Facts = {}
    llm = engine(folder, tensor_parallel_size=2, enforce_eager=False)
    _survive(llm, facts, _reloads(llm), lambda: tokens(llm))
    return facts


# Quantised checkpoints


@scenario(**IN_PROCESS)
def survives_fp8_static(folder: Path) -> Facts:
    return _quantised(folder, "fp8")


@scenario(**IN_PROCESS)
def survives_gptq(folder: Path) -> Facts:
    return _quantised(folder, "gptq")


@scenario(**IN_PROCESS)
def survives_compressed_tensors_kv_scales(folder: Path) -> Facts:
    return _quantised(folder, "compressed-tensors")


def _quantised(folder: Path, method: str) -> Facts:
    """Level 1, and level 2 with either load: the same tokens, or what was not loaded is named, or vLLM refuses."""
    quantised = folder.parent / f"quantised-{method}"
    _write_quantised(folder, quantised, method)
    facts: Facts = {}
    llm = engine(quantised)
    before = _greedy(llm)
    _rpc(llm, note)
    llm.sleep(level=1)
    _rpc(llm, scribble)
    llm.wake_up()
    (found,) = _rpc(llm, differing)
    check(f"level 1: {len(found)} differ: {found[:5]}", not found)
    check("level 1: what it says", _greedy(llm) == before)
    loads: dict[str, Callable[[], Any]] = {
        "reload_weights": _reloads(llm),
        "load_weights in place": lambda: _rpc(llm, load_in_place, str(quantised)),
    }
    for name, load in loads.items():
        facts[name] = _after_level_2(llm, load, before)
        check(f"{name}: {facts[name]}", facts[name] != "other tokens")
        if facts[name] != "the same tokens":
            break  # the model is not what it was
    return facts


def _after_level_2(llm: Any, load: Callable[[], Any], before: Any) -> str:
    llm.sleep(level=2)
    _rpc(llm, scribble)
    llm.wake_up(tags=["weights"])
    try:
        load()
    except Exception as error:
        return f"vLLM refuses: {type(error).__name__}: {str(error)[:200]}"
    llm.wake_up(tags=["kv_cache"])
    (status,) = llm.collective_rpc("cumem_sleep_status")
    if status["not_loaded"]:
        return f"not loaded: {status['not_loaded']}"
    llm.reset_prefix_cache()
    return "the same tokens" if _greedy(llm) == before else "other tokens"


_BY_METHOD: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8", "activation_scheme": "static"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True},
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False},
                "input_activations": {
                    "num_bits": 8,
                    "type": "float",
                    "strategy": "tensor",
                    "symmetric": True,
                    "dynamic": False,
                },
            }
        },
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False},
    },
}


def _write_quantised(folder: Path, target: Path, method: str) -> None:
    """The checkpoint, with its projections quantised."""
    from safetensors.torch import load_file, save_file

    target.mkdir(exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "quantization_config": _BY_METHOD[method]}))
    for file in sorted(folder.glob("*.safetensors")):
        written = {}
        for name, tensor in load_file(file).items():
            if name.endswith("proj.weight"):
                written.update(_projection(name.removesuffix(".weight"), tensor, method))
            else:
                written[name] = tensor.contiguous()
            if method == "compressed-tensors" and name.endswith("k_proj.weight"):
                written.update(_kv_scales(name.removesuffix("k_proj.weight")))
        save_file(written, target / file.name)


def _projection(name: str, weight: Any, method: str) -> dict[str, Any]:
    import torch

    if method == "gptq":
        rows, columns = weight.shape[1], weight.shape[0]
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        packed = torch.randint(-(1 << 31), 1 << 31, (rows // 8, columns), generator=generator).to(torch.int32)
        return {
            f"{name}.qweight": packed,
            f"{name}.qzeros": torch.full((rows // 128, columns // 8), 0x77777777, dtype=torch.int32),
            f"{name}.scales": torch.full((rows // 128, columns), 0.004, dtype=torch.float16),
            f"{name}.g_idx": torch.arange(rows, dtype=torch.int32) // 128,
        }
    scale = weight.abs().max().float() / 448
    return {
        f"{name}.weight": (weight.float() / scale).to(torch.float8_e4m3fn),
        f"{name}.weight_scale": scale.reshape(()) if method == "fp8" else scale.reshape(1),
        f"{name}.input_scale": torch.tensor(0.05) if method == "fp8" else torch.tensor([0.05]),
    }


def _kv_scales(prefix: str) -> dict[str, Any]:
    import torch

    return {f"{prefix}k_scale": torch.tensor([0.03]), f"{prefix}v_scale": torch.tensor([0.02])}


@scenario(alone=True, other_shape=True, **IN_PROCESS)
def what_surviving_costs_32b(folder: Path) -> Facts:
    """Sleeps and wakes at level 1 with a declaration of what may be dropped, and in turn without: seconds."""
    from checkpoints import SHAPES

    from cumem_sleep.vllm import droppable

    shape = folder.parent / "32B-dummy"
    shape.mkdir(exist_ok=True)
    (shape / "config.json").write_text(json.dumps(SHAPES["32B"].config()))
    facts: Facts = {}
    options = {"kv_cache_memory_bytes": 52 << 30, "gpu_memory_utilization": 0.9}
    llm = engine(shape, load_format="dummy", **options)
    declared = droppable.declared
    llm.sleep(level=1)
    llm.wake_up()
    for number in range(10):
        way = ("declared", "not declared")[number % 2]
        droppable.declared = declared if way == "declared" else lambda *_: contextlib.nullcontext()
        time.sleep(3)  # until the driver has scrubbed what was freed
        with timed(facts, f"{way}: sleep s"):
            llm.sleep(level=1)
        time.sleep(3)
        with timed(facts, f"{way}: wake s"):
            llm.wake_up()
    droppable.declared = declared
    for level in (1, 2):
        with timed(facts, f"asking what level {level} may drop s"):
            _rpc(llm, _ask, level)
    return facts


def _ask(worker: Any, level: int) -> int:
    from cumem_sleep.vllm import droppable

    return len(droppable.at_level(worker, level))
