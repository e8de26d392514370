"""What a sleep of vLLM's own worker may lose: the KV cache's tensors, and at level 2 what a load writes."""

from __future__ import annotations

import types
from typing import Any

import pytest
from environment import Stock, skip_unless_vllm
from real_worker import Models, asleep, backends
from support import fresh_allocator

from cumem_sleep import CuMemAllocator, CumemSleepError, OutOfHostMemory, sim
from cumem_sleep.vllm import kv_blocks, loaded, worker_refusals

skip_unless_vllm()
pytestmark = pytest.mark.sim

KV = {"attention", "mamba_0", "mamba_1", "shared", "cross_layers", "the_runners"}
WRITTEN = {"weight", "tied", "transposed", "qkv", "fc"}


class Kinds:
    """A tensor of each kind beside one another, and which have other bytes than when they were made."""

    def __init__(self, models: Models) -> None:
        self.models = models
        self._at_first: dict[str, Any] = {}
        self.tensors: dict[str, Any] = {}
        self._add_kv_cache()
        self._add_weights(models.model, models.draft)
        self.note()

    def load(self) -> None:
        """Write what somebody writes again after each sleep."""
        for name in KV | WRITTEN:
            self.tensors[name].untyped_storage().fill_(9)
        self.note()

    def note(self) -> None:
        self._at_first = {name: self._bytes(name) for name in self.tensors}

    def _bytes(self, name: str) -> Any:
        return bytes(self.tensors[name].untyped_storage().tolist())

    def lost(self) -> set[str]:
        return {name for name, before in self._at_first.items() if self._bytes(name) != before}

    def _tensor(self, name: str, tag: str = "weights") -> Any:
        import torch

        return self.tensors.setdefault(name, self.models.tensor(torch.randn(8, 6), tag))

    def _add_kv_cache(self) -> None:
        import torch

        def kv(name: str) -> Any:
            return self._tensor(name, "kv_cache")

        shared, runner = kv("shared"), self.models.worker.model_runner
        caches = {
            "attention": kv("attention")[1:, ::2],  # a view of its storage
            "mamba": [(kv("mamba_0"), [kv("mamba_1")])],
            "first": [shared[:4]],
            "second": [shared[4:]],
            "on the host": torch.ones(16),
            "not yet": torch.tensor([]),
            "of an unknown kind": types.SimpleNamespace(tensor=kv("unknown")),
        }
        layers = {name: types.SimpleNamespace(kv_cache=cache) for name, cache in caches.items()}
        layers["without"] = types.SimpleNamespace()
        config = types.SimpleNamespace(static_forward_context=layers)
        self.models.worker.vllm_config.compilation_config = config
        runner.kv_caches, runner.cross_layers_kv_cache = [kv("the_runners")], kv("cross_layers")
        runner.block_table = kv("block_table")

    def _add_weights(self, model: Any, draft: Any) -> None:
        import torch

        def add(name: str, data: Any, module: Any = model) -> None:
            module.register_parameter(name, torch.nn.Parameter(data, requires_grad=False))

        add("weight", self._tensor("weight"))
        model.view = model.weight[2:4]
        add("tied", self._tensor("tied"))
        model.register_parameter("tied_under_the_name_that_a_load_writes", model.tied)
        add("transposed", self._tensor("transposed").t())
        add("k", self._tensor("qkv")[5:])
        add("q", self.tensors["qkv"][:5])
        add("scale", self._tensor("scale"))
        add("part", self._tensor("partly_covered")[1:])
        add("every_other", self._tensor("gapped").flatten()[::2])
        add("behind_it", self.tensors["gapped"].flatten()[24:])
        add("fc", self._tensor("fc"), draft)
        add("weight_of_the_target", model.weight.data, draft)
        draft.register_buffer("table", self._tensor("buffer"))
        model.register_buffer("vllm_saves_it", self._tensor("buffer_of_the_model"))
        model.constant = self._tensor("constant")
        model.lora_a_stacked = [self._tensor("adapter_0"), self._tensor("adapter_1")]
        model._cumem_sleep_written = {name for name, _ in loaded.named_parameters(model, "")} - {"scale", "tied"}
        draft._cumem_sleep_written = {"fc"}


@pytest.fixture
def kinds(models: Models) -> Kinds:
    return Kinds(models)


WAKES = [[None], [["weights"], ["kv_cache"]], [["kv_cache"], ["weights"]]]


def _wake(models: Models, wakes: list[Any]) -> None:
    for tags in wakes:
        models.wrapper.wake_up(tags)


@backends
@pytest.mark.parametrize("wakes", WAKES, ids=str)
@pytest.mark.parametrize("level", [1, 2, 3])
def test_a_sleep_loses_only_what_is_written_again(
    kinds: Kinds, choose: Any, backend: str, level: int, wakes: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded, "MOST_NAMES", 100)
    choose(backend)
    models = kinds.models
    if level == 2 and wakes == WAKES[2] and not hasattr(models.worker, "_restore_sleep_parameters"):
        pytest.skip("this vLLM writes buffers in each wake, also while weights sleep")
    for _ in range(2):
        models.wrapper.sleep(level=level)
        assert asleep() == {"weights", "kv_cache"}
        _wake(models, wakes)
        assert kinds.lost() == (KV | WRITTEN if level == 2 else KV)
        left_out = {"weight", "tied", "transposed", "k", "q", "draft.fc"} if level == 2 else set()
        assert set(filter(None, models.not_loaded.split(", "))) == left_out
        kinds.load()
        assert models.not_loaded == ""


@pytest.mark.parametrize("level", [1, 3])
def test_a_forget_loses_no_more_than_level_2(kinds: Kinds, level: int) -> None:
    kinds.models.wrapper.sleep(level=level)
    assert kinds.models.wrapper.cumem_sleep_forget() > 0
    kinds.models.wrapper.wake_up()
    assert kinds.lost() == KV | WRITTEN


@backends
def test_a_discard_of_the_kv_cache_loses_that_alone(kinds: Kinds, choose: Any, backend: str) -> None:
    if not hasattr(kinds.models.worker, "discard"):
        pytest.skip("this vLLM cannot discard")
    choose(backend)
    kinds.models.wrapper.discard(("kv_cache",))
    assert asleep() == {"kv_cache"}
    kinds.models.wrapper.wake_up()
    assert kinds.lost() == KV


def test_a_parameter_that_was_replaced_is_dropped_where_it_is_by_now(kinds: Kinds) -> None:
    """Its old storage may hold something else since."""
    import torch

    models, tensor = kinds.models, kinds._tensor
    models.sleep_and_wake()
    kinds.load()
    models.model.weight.data = tensor("by_data")
    models.draft.fc = torch.nn.Parameter(tensor("by_a_new_one"), requires_grad=False)
    kinds.note()
    models.sleep_and_wake()
    assert kinds.lost() == KV | WRITTEN - {"weight", "fc"} | {"by_data", "by_a_new_one"}


def test_level_2_without_host_memory_names_what_it_would_keep(
    worker: Any, plugged: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from cumem_sleep.core.pools import Pools

    fresh_allocator(host_budget_bytes=1)
    models = Models(worker, plugged)
    monkeypatch.setattr(Pools, "in_use", models.in_use)
    layer = torch.nn.Module()
    models.model.add_module("layer", layer)
    models.add(layer, "weight", 4096)
    models.add(layer, "table", 2048, buffer=True)
    layer.fused = [models.tensor(torch.ones(1024)), models.tensor(torch.ones(512))]
    models.draft.table, models.draft.on_host = layer.table, torch.ones(1 << 20)
    with pytest.raises(OutOfHostMemory) as raised:
        models.wrapper.sleep(level=2)
    named = "layer.fused (6.00 KiB), layer.table (4.00 KiB)"
    assert raised.value.detail == f"no load is known to write these again: {named}"
    assert asleep() == set()


@backends
@pytest.mark.parametrize("call", ["cuMemHostRegister", "cuMemcpyDtoHAsync", "cuMemUnmap"])
def test_a_level_2_that_fails_loses_nothing(kinds: Kinds, choose: Any, backend: str, call: str) -> None:
    choose(backend)
    models = kinds.models
    sim.fail(call, error="CUDA_ERROR_UNKNOWN", times=100)
    with pytest.raises(CumemSleepError, match=call):
        models.wrapper.sleep(level=2)
    sim.reset()
    assert asleep() == set()
    assert kinds.lost() == set()
    _check_level_2(kinds)


@backends
@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemMap", "cuMemcpyHtoDAsync", "cuMemsetD32Async"])
def test_a_wake_from_level_2_that_fails_brings_nothing_back(kinds: Kinds, choose: Any, backend: str, call: str) -> None:
    choose(backend)
    models = kinds.models
    models.wrapper.sleep(level=2)
    sim.fail(call, error="CUDA_ERROR_UNKNOWN", times=100)
    with pytest.raises(CumemSleepError, match=call):
        models.wrapper.wake_up()
    sim.reset()
    assert asleep() == {"weights", "kv_cache"}
    models.wrapper.wake_up()
    assert kinds.lost() == KV | WRITTEN
    _check_level_2(kinds)


def _check_level_2(kinds: Kinds) -> None:
    kinds.load()
    kinds.models.sleep_and_wake()
    assert kinds.lost() == KV | WRITTEN


@backends
@pytest.mark.parametrize("fails", [False, True])
def test_kept_blocks_and_what_survives_share_a_segment(
    kinds: Kinds, choose: Any, backend: str, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(backend)
    models, allocator, kept = kinds.models, CuMemAllocator.get_instance(), kinds.tensors["shared"]
    kept_bytes = kept.untyped_storage().nbytes()
    keep = {kept.data_ptr(): [(0, kept_bytes)]}
    monkeypatch.setattr(kv_blocks, "_plan", kv_blocks._Plan(keep=keep, is_due=True))
    own = dict(vars(allocator))
    if fails:
        sim.fail("cuMemUnmap", error="CUDA_ERROR_UNKNOWN", times=100)
        with pytest.raises(CumemSleepError, match="cuMemUnmap"):
            models.wrapper.sleep(level=1)
        sim.reset()
    else:
        models.sleep_and_wake(level=1)
        assert kv_blocks._plan.slept.kept_bytes == kept_bytes
        assert kinds.lost() == KV - {"shared"}
    assert vars(allocator).keys() == own.keys()
    assert not kv_blocks._plan.is_due
    kinds.load()
    models.sleep_and_wake(level=1)
    assert kinds.lost() == KV


@pytest.mark.parametrize("says", [{"weight"}, None], ids=str)
@pytest.mark.parametrize("fails", [False, True])
def test_what_the_first_load_did_not_write_is_kept(
    models: Models, monkeypatch: pytest.MonkeyPatch, says: set[str] | None, fails: bool
) -> None:
    """By vLLM's own loader, and a model whose `load_weights` returns what it has written, or nothing."""
    import torch
    from vllm.model_executor.model_loader import base_loader

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            models.add(self, "weight", 64)
            models.add(self, "scale", 64)

        def load_weights(self, weights: Any) -> set[str] | None:
            return says

    class Loader(base_loader.BaseModelLoader):  # type: ignore[misc]
        def download_model(self, model_config: Any) -> None: ...

        def load_weights(self, model: Any, model_config: Any) -> None:
            model.load_weights(iter(()))
            if fails:
                raise RuntimeError("the network is down")

    def make(*args: Any, **kwargs: Any) -> Any:
        made.append(Model())
        return made[-1]

    def load_model() -> None:
        load_config = types.SimpleNamespace(device="cpu")
        config = types.SimpleNamespace(load_config=load_config, device_config=types.SimpleNamespace(device="cpu"))
        model_config = types.SimpleNamespace(dtype=torch.bfloat16, quantization=None)
        config.model_config, config.quant_config = model_config, None
        models.worker.model_runner.model = Loader(load_config).load_model(config, model_config)

    made: list[Any] = []
    monkeypatch.setattr(worker_refusals, "watch", lambda _: None)  # it wraps `load_weights`, too
    monkeypatch.setattr(base_loader, "initialize_model", make)
    monkeypatch.setattr(base_loader, "process_weights_after_loading", lambda *_: None)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None, raising=False)
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda: 0, raising=False)
    models.worker.load_model = load_model
    if fails:
        with pytest.raises(RuntimeError, match="the network is down"):
            models.wrapper.load_model()
    else:
        models.wrapper.load_model()
        before = models.worker.model_runner.model.scale.clone()
        models.sleep_and_wake()
        assert torch.equal(models.worker.model_runner.model.scale, before) == (says is not None)
        assert models.not_loaded == ("weight" if says else "weight, scale")
    (model,) = made
    assert "load_weights" not in vars(model)
    assert base_loader.initialize_model is make
