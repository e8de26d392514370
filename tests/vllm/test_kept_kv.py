"""A KV cache that survives a sleep, on the real scheduler of this vLLM: see `kept_kv_episodes`.

CUMEM_SLEEP_TEST_GATE_SECONDS says for how long new episodes begin, and CUMEM_SLEEP_TEST_GATE_SEED which is the
first.
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import os
import pathlib
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from environment import skip_unless_vllm
from ready_process import ReadyProcess

from cumem_sleep.vllm import kept_kv, kv_blocks

skip_unless_vllm()
torch = pytest.importorskip("torch")

MUTANTS = (
    *("no-eviction", "other-blocks", "no-verdict", "unexecuted-blocks", "no-change", "no-digests"),
    "unheard-eviction",
)
FINDING = {"no-eviction": "105"}  # of the seeds that were tried, the one from which on it is found first


def _is_served() -> bool:
    return importlib.metadata.version("vllm").rpartition(".")[0] in kept_kv.VERSIONS


def real(test: Any) -> Any:
    """With a real vLLM that keeps its KV cache."""
    served = pytest.mark.skipif(not _is_served(), reason="this version resets its prefix cache")
    return pytest.mark.timeout(900)(served(test))


def _options(seed: str, workers: int, seconds: str) -> list[str]:
    seed = os.environ.get("CUMEM_SLEEP_TEST_GATE_SEED", seed)
    return ["--seed", seed, "--workers", str(workers), "--seconds", seconds]


@real
def test_each_way_to_keep_and_to_lose_it(ready_process: ReadyProcess, tmp_path: pathlib.Path) -> None:
    log = ready_process.check("kept_kv_scenarios.py", tmp_path / "log")
    assert log.count("as it should be") >= 20


@real
def test_the_example_of_a_conversation(ready_process: ReadyProcess, tmp_path: pathlib.Path) -> None:
    log = ready_process.check("example_of_kept_kv.py", tmp_path / "log", str(tmp_path))
    assert "the conversation went on where it was" in log
    assert not (tmp_path / "touches.jsonl").exists(), log


@real
@pytest.mark.parametrize("engines", [1, 2])
def test_two_api_servers_over_one_engine_and_over_data_parallel_ones(
    ready_process: ReadyProcess, engines: int, tmp_path: pathlib.Path
) -> None:
    """A gate in each decides with the other's when the engine cores sleep: here these are processes of vLLM's."""
    print(ready_process.check("kept_kv_servers.py", tmp_path / "log", "--engines", str(engines)))


@real
@pytest.mark.parametrize("workers", [1, 2])
def test_no_hit_finds_other_bytes_than_its_hash_says(
    ready_process: ReadyProcess, workers: int, tmp_path: pathlib.Path
) -> None:
    """With one worker and with two, each in its process: tensor parallel, and a pipeline."""
    seconds = os.environ.get("CUMEM_SLEEP_TEST_GATE_SECONDS", "20" if workers == 1 else "5")
    print(ready_process.check("kept_kv_episodes.py", tmp_path / "log", *_options("1", workers, seconds)))


@real
@pytest.mark.parametrize(("mutant", "workers"), [*((mutant, 1) for mutant in MUTANTS), ("one-worker", 2)])
def test_the_episodes_find_what_is_broken(
    ready_process: ReadyProcess, mutant: str, workers: int, tmp_path: pathlib.Path
) -> None:
    options = [*_options(FINDING.get(mutant, "42"), workers, "200"), "--mutant", mutant]
    log = ready_process.check("kept_kv_episodes.py", tmp_path / "log", *options, code=1)
    assert (" blocks that are gone" if mutant == "unheard-eviction" else " reads what is of ") in log


# Layouts


def _worker(num_blocks: int, views: dict[str, Any], sizes: list[tuple[int, int]]) -> Any:
    """A worker with these views of its layers, and tensors of these bytes and block strides in its configuration."""
    layers = {name: SimpleNamespace(kv_cache=view) for name, view in views.items()}
    tensors = [SimpleNamespace(size=size, block_stride=stride) for size, stride in sizes]
    caches = SimpleNamespace(num_blocks=num_blocks, kv_cache_groups=[_group(*views)], kv_cache_tensors=tensors)
    config = _config(compilation_config=SimpleNamespace(static_forward_context=layers))
    return SimpleNamespace(model_runner=SimpleNamespace(kv_cache_config=caches), vllm_config=config)


def _config(**more: Any) -> Any:
    """What an engine is configured with whose cache can be kept."""
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(scheduler_cls=None),
        cache_config=SimpleNamespace(cache_dtype="auto", enable_prefix_caching=True),
        kv_transfer_config=None,
        parallel_config=SimpleNamespace(distributed_executor_backend="mp", world_size=2),
        offload_config=SimpleNamespace(
            uva=SimpleNamespace(cpu_offload_gb=0), prefetch=SimpleNamespace(offload_group_size=0)
        ),
        **more,
    )


def _spec(kind: str, **attributes: Any) -> Any:
    return type(kind, (), attributes)()


def _group(*layers: str, kind: str = "FullAttentionSpec", **attributes: Any) -> Any:
    return SimpleNamespace(layer_names=list(layers), kv_cache_spec=_spec(kind), **attributes)


def _bytes(*shape: int) -> Any:
    return torch.zeros(shape, dtype=torch.int8)


def _read(layout: kv_blocks.BlockLayout, blocks: list[int], views: dict[str, Any]) -> list[int]:
    """The blocks that those ranges hold, if every view of block b is filled with b."""
    memory = {view.untyped_storage().data_ptr(): view.untyped_storage() for view in views.values()}
    read = [
        np.frombuffer(bytes(memory[address][offset : offset + nbytes]), dtype=np.int8)
        for address, table in layout.ranges(blocks).items()
        for offset, nbytes in table.tolist()
    ]
    assert sum(map(len, read)) == len(blocks) * layout.block_bytes
    return sorted(set(np.concatenate(read).tolist()))


@pytest.mark.parametrize(
    ("budget", "change", "version", "prepared"),
    [
        (1000, {}, "0.26.0", 1000),
        (1 << 40, {}, "0.33.0", 5000),
        ("auto", {}, "0.33.0", 5000),
        (0, {}, "0.33.0", 0),
        (1000, {"kv_transfer_config": object()}, "0.33.0", 0),
        (1000, {"model_runner": None}, "0.33.0", 0),
        (1000, {}, "0.27.0", 0),
    ],
)
def test_no_more_is_prepared_than_a_sleep_will_keep(
    monkeypatch: pytest.MonkeyPatch, budget: int | str, change: dict[str, Any], version: str, prepared: int
) -> None:
    allocator = SimpleNamespace(settings=SimpleNamespace(keep_kv_bytes=budget), kept_room=lambda: 5000)
    worker = _worker(7, {"a": _bytes(7, 64)}, [(448, 0)])
    for name, value in change.items():
        setattr(worker if hasattr(worker, name) else worker.vllm_config, name, value)
    monkeypatch.setattr(kv_blocks, "_allocator", lambda: allocator)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))
    assert kv_blocks.bytes_to_prepare(worker) == prepared


@pytest.mark.parametrize(
    ("budget", "rank", "size", "version", "said"),
    [
        ("auto", 0, 1, "0.33.0", "sleeps keep up to 300 B of 448 B in each worker"),
        (0, 0, 1, "0.26.0", "sleeps clear the KV cache, and would keep up to 300 B of 448 B in each worker"),
        (0, 0, 2, "0.33.0", "would keep up to 300 B of 448 B"),
        (0, 1, 2, "0.33.0", None),
        (100, 0, 1, "0.33.0", None),
        (0, 0, 1, "0.27.0", None),
    ],
)
def test_the_log_says_what_auto_would_keep(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    budget: int | str,
    rank: int,
    size: int,
    version: str,
    said: str | None,
) -> None:
    """Once for all workers of an engine, which keep it at the same time."""
    ranks = SimpleNamespace(mesh=SimpleNamespace(rank=rank, size=size)) if size > 1 else None
    settings = SimpleNamespace(keep_kv_bytes=budget)
    allocator = SimpleNamespace(settings=settings, kept_room=lambda: 300, _agreement=ranks)
    monkeypatch.setattr(kv_blocks, "_allocator", lambda: allocator)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))
    monkeypatch.setattr(logging.getLogger("cumem_sleep"), "propagate", True)
    with caplog.at_level(logging.INFO, "cumem_sleep"):
        kv_blocks.say_what_auto_keeps(_worker(7, {"a": _bytes(7, 64)}, [(448, 0)]))
        kv_blocks.say_what_auto_keeps(None)  # it has no KV cache that anybody knows
    lines = [line for line in dict.fromkeys(caplog.messages) if "CUMEM_SLEEP_KEEP_KV_BYTES=auto" in line]
    assert [said in line for line in lines] == ([True] if said else [])


def test_each_layer_may_have_a_tensor_of_its_own() -> None:
    views = {name: _bytes(7, 16, 64) for name in ("a", "b")}
    layout = kv_blocks.layout_of(_worker(7, views, [(7 << 10, 0)] * 2))
    assert layout.block_bytes == 2 << 10
    assert [table.tolist() for table in layout.ranges([5, 1, 2]).values()] == [[[1024, 2048], [5120, 1024]]] * 2


@pytest.mark.parametrize("is_split", [False, True], ids=["whole blocks", "blocks in parts"])
def test_keys_and_values_may_be_apart(is_split: bool) -> None:
    views = {"a": _bytes(2, 14, 8, 64) if is_split else _bytes(2, 7, 16, 64)}
    layout = kv_blocks.layout_of(_worker(7, views, [(14 << 10, 0)]))
    for block in range(7):
        parts = slice(2 * block, 2 * block + 2) if is_split else block
        views["a"][:, parts] = block
    assert _read(layout, [6, 3], views) == [3, 6]


def test_layers_may_lie_one_after_the_other_in_one_tensor() -> None:
    memory = _bytes(3, 7, 1024)
    views = {str(layer): memory[layer].view(7, 16, 64) for layer in range(3)}
    layout = kv_blocks.layout_of(_worker(7, views, [(21 << 10, 1024)]))
    for block in range(7):
        memory[:, block] = block
    assert _read(layout, [0, 1, 4], views) == [0, 1, 4]


def test_layers_may_lie_one_after_the_other_in_each_block() -> None:
    memory = _bytes(7, 3, 16, 64)
    views = {str(layer): memory[:, layer] for layer in range(3)}
    layout = kv_blocks.layout_of(_worker(7, views, [(21 << 10, 3 << 10)] * 3))
    assert layout.ranges([2, 3])[memory.data_ptr()].tolist() == [[6 << 10, 6 << 10]]


def test_heads_may_be_outside_of_blocks() -> None:
    memory = _bytes(2, 4, 7, 256)  # layers, heads
    views = {str(layer): memory[layer].permute(1, 0, 2) for layer in range(2)}
    layout = kv_blocks.layout_of(_worker(7, views, [(14 << 10, 1024)] * 2))
    for block in range(7):
        memory[:, :, block] = block
    assert layout.block_bytes == 2 << 10
    assert _read(layout, [1, 6], views) == [1, 6]


@pytest.mark.parametrize(
    ("views", "sizes", "why"),
    [
        ({"a": [_bytes(7, 64)]}, [(448, 0)], "is no tensor"),
        ({"a": _bytes(0)}, [(0, 0)], "is no tensor"),
        ({"a": _bytes(6, 64)}, [(384, 0)], "there are 7 blocks"),
        ({"a": _bytes(7, 14, 64)}, [(6272, 0)], "there are 7 blocks"),
        ({"a": _bytes(7, 64)}, [(448, 0), (448, 0)], "belongs to no layer"),
        ({"a": _bytes(7, 128)[:, :64]}, [(896, 0)], ""),
        ({"a": _bytes(8, 64)[1:]}, [(512, 0)], "do not tile"),
        ({"a": _bytes(2, 7, 64)[1]}, [(896, 0)], "do not tile"),
        ({"a": _bytes(7, 24)}, [(168, 0)], "do not tile"),
    ],
)
def test_what_is_not_certain_is_refused(views: dict[str, Any], sizes: list[tuple[int, int]], why: str) -> None:
    answer = kv_blocks.answer(_worker(7, views, sizes), "plan", 1, [1])
    assert why in answer["why"]
    assert bool(why) == bool(answer["why"])
    kv_blocks.answer(None, "drop")


def test_a_quantized_cache_that_vllm_clears_is_refused() -> None:
    worker = _worker(7, {"a": _bytes(7, 64)}, [(448, 0)])
    worker.model_runner.init_fp8_kv_scales = None
    assert kv_blocks.answer(worker, "plan", 1, [1])["why"] == ""
    worker.vllm_config.cache_config.cache_dtype = "fp8"
    assert "clears a KV cache of fp8" in kv_blocks.answer(worker, "plan", 1, [1])["why"]
    kv_blocks.answer(None, "drop")


# Engines whose sleeps reset the prefix cache


_WINDOWS = _group(kind="SlidingWindowSpec")
_UNIFORM = _group()
_UNIFORM.kv_cache_spec = _spec(
    "UniformTypeKVCacheSpecs",
    kv_cache_specs={"a": _spec("MLAAttentionSpec"), "b": _spec("CrossAttentionSpec")},
)


@pytest.mark.parametrize(
    ("groups", "why"),
    [
        ([_group(), _WINDOWS], ""),
        ([_group(), _group(kind="MambaSpec")], "a kind with which that was not tested (MambaSpec)"),
        ([_group(), _group(kind="ChunkedLocalAttentionSpec")], "not tested (ChunkedLocalAttentionSpec)"),
        ([_UNIFORM], "a kind with which that was not tested (CrossAttentionSpec)"),
        ([_group(), _group(host_resident=True)], "in host memory"),
        ([], "no KV cache"),
    ],
)
def test_a_cache_of_another_kind_is_refused(groups: list[Any], why: str) -> None:
    refusal = kept_kv.refusal(_config(), SimpleNamespace(kv_cache_groups=groups))
    assert why in refusal
    assert bool(why) == bool(refusal)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, ""),
        ({"kv_transfer_config": object()}, "a KV connector"),
        ({"aux_output_config": SimpleNamespace(enabled=True)}, "auxiliary outputs"),
        ({"aux_output_config": SimpleNamespace(enabled=False)}, ""),
        ({"scheduler_config.scheduler_cls": "vllm.v1.core.sched.diffusion_scheduler.DiffusionScheduler"}, "not vLLM's"),
        ({"cache_config.enable_prefix_caching": False}, "caching is off"),
        ({"parallel_config.distributed_executor_backend": "external_launcher"}, "an engine of its own"),
        (
            {"parallel_config.distributed_executor_backend": "external_launcher", "parallel_config.world_size": 1},
            "",
        ),
        ({"offload_config.uva.cpu_offload_gb": 4}, "weights may be in host memory"),
        ({"offload_config.prefetch.offload_group_size": 2}, "weights may be in host memory"),
    ],
)
def test_an_engine_of_another_kind_is_refused(change: dict[str, Any], why: str) -> None:
    """By its core, and by its workers."""
    worker = _worker(7, {"a": _bytes(7, 64)}, [(448, 0)])
    for path, value in change.items():
        *owners, name = path.split(".")
        setattr(functools.reduce(getattr, owners, worker.vllm_config), name, value)
    refusal = kept_kv.refusal(worker.vllm_config, worker.model_runner.kv_cache_config)
    assert why in refusal
    assert bool(why) == bool(refusal)
    assert kv_blocks.answer(worker, "plan", 1, [1])["why"] == refusal
    kv_blocks.answer(None, "drop")


@pytest.mark.parametrize(
    ("version", "is_served"), [("0.26.1", True), ("0.33.0", True), ("0.27.0", False), ("dev", False)]
)
def test_other_versions_reset_it(monkeypatch: pytest.MonkeyPatch, version: str, is_served: bool) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))
    assert (kept_kv.version_misfit() == "") == is_served
