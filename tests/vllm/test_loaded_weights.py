"""Weights that come back without their bytes and are not loaded again: vLLM's own worker, around small models."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import pytest
from environment import skip_unless_vllm
from real_worker import PAGE, Models, backends

from cumem_sleep import CuMemAllocator
from cumem_sleep.vllm import loaded

skip_unless_vllm()
pytestmark = pytest.mark.sim


def poison_what_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = CuMemAllocator.get_instance()
    settings = dataclasses.replace(allocator.settings, poison=True)
    monkeypatch.setattr(allocator, "settings", settings)
    object.__setattr__(allocator._components, "settings", settings)


@backends
def test_a_draft_that_a_reload_leaves_out_is_named(models: Models, choose: Any, backend: str) -> None:
    choose(backend)
    models.add(models.model, "weight", 300, 70)
    models.add(models.draft, "fc", 100, 30)
    assert models.not_loaded == ""
    models.sleep_and_wake()
    assert models.not_loaded == "weight, draft.fc"
    models.load(models.model)
    assert models.not_loaded == "draft.fc"
    models.sleep_and_wake(level=1)
    assert models.not_loaded == "draft.fc", "what was backed up is still not loaded"
    models.load(models.draft)
    assert models.not_loaded == ""


def test_a_reload_says_what_it_left_out(models: Models) -> None:
    models.add(models.model, "weight", 64)
    models.add(models.draft, "fc", 64)
    models.worker.reload_weights = lambda: models.load(models.model)
    assert models.wrapper.reload_weights() is None
    models.sleep_and_wake()
    assert models.wrapper.reload_weights() == "draft.fc"
    models.load(models.draft)
    assert models.wrapper.reload_weights() is None


def test_weights_that_sleep_are_not_looked_at(models: Models) -> None:
    models.add(models.model, "weight", 64)
    models.sleep_and_wake(tags=["weights"])
    models.wrapper.sleep(level=2)
    assert models.not_loaded == ""
    models.wrapper.wake_up()
    assert models.not_loaded == "weight"


def test_every_kind_of_parameter_is_told(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(loaded, "MOST_NAMES", 100)
    model, draft = models.model, models.draft
    shared = models.add(model, "embedding", 40, 8)
    draft.register_parameter("embedding", shared)  # as a draft model shares its target's
    model.register_parameter("head", shared)  # tied
    models.add(model, "empty", 0)
    models.add(model, "scale", value=torch.tensor(1.5))
    models.add(model, "of_two_bytes", value=torch.tensor([0.5], dtype=torch.float16))
    models.add(model, "zeros", value=torch.zeros(33, dtype=torch.bfloat16))
    models.add(model, "packed", value=torch.randint(0, 255, (16, 8), dtype=torch.uint8))
    models.add(model, "sizes", value=torch.tensor([4096, 11008]))
    models.add(model, "fp8", 24, 8, dtype=torch.float8_e4m3fn)
    rows = models.add(draft, "rows", 12, 64)
    padded = models.add(draft, "padded", 6, 32)
    model.register_parameter("transposed", torch.nn.Parameter(rows.data.t(), requires_grad=False))
    model.register_parameter("cut", torch.nn.Parameter(padded.data[:, :30], requires_grad=False))
    model.register_parameter("elsewhere", torch.nn.Parameter(torch.ones(4)))
    model.register_parameter("on_no_device", torch.nn.Parameter(torch.ones(4, device="meta")))
    model.register_parameter("not_yet", torch.nn.parameter.UninitializedParameter())
    buffer = models.add(model, "kept", 16, buffer=True)
    kept = buffer.clone()
    models.sleep_and_wake()
    assert torch.equal(buffer, kept), "vLLM restores buffers"
    names = ["embedding", "scale", "of_two_bytes", "zeros", "packed", "sizes", "fp8", "transposed", "cut"]
    while names:
        assert models.not_loaded == ", ".join(names)
        parameter = getattr(model, names.pop(0))
        source = {**models.values, rows.data_ptr(): models.values[rows.data_ptr()].t()}[parameter.data_ptr()]
        parameter.data.copy_(source[:, : parameter.shape[-1]] if source.dim() == 2 else source)
    assert models.not_loaded == ""


def test_parameters_that_are_out_of_the_model_while_it_is_loaded_are_told_afterwards(models: Models) -> None:
    """As vLLM's layerwise reload puts them on no device; the status may be asked for meanwhile."""
    import torch

    weight = models.add(models.model, "weight", 64)
    models.add(models.draft, "fc", 64)
    models.sleep_and_wake()
    models.model.weight = torch.nn.Parameter(torch.empty(64, device="meta"), requires_grad=False)
    assert models.not_loaded == "draft.fc"
    models.model.weight = weight
    assert models.not_loaded == "weight, draft.fc"


@backends
@pytest.mark.parametrize("level", [1, 3])
def test_what_was_forgotten_counts_as_dropped(models: Models, choose: Any, backend: str, level: int) -> None:
    import torch

    choose(backend)
    weight = models.add(models.model, "weight", 300, 70)
    old = weight.clone()
    models.add(models.draft, "fc", 100, 30)
    table = models.add(models.model, "table", 5, 16, buffer=True)
    models.model.register_buffer("column", table[:, 3:5])
    models.model.register_buffer("elsewhere", torch.ones(3))
    models.model.register_buffer("nothing", table[:0])
    before = table.clone()
    for _ in range(2):
        models.wrapper.sleep(level=level)
        nbytes = models.wrapper.cumem_sleep_forget(["weights"])
        assert nbytes == 2 * (300 * 70 + 100 * 30)
        status = models.wrapper.cumem_sleep_status()
        assert status["usage"]["weights"]["backed_up_bytes"] == PAGE - nbytes, "of the buffer, which no load writes"
        assert status["checkpointed"] == (level == 3)
        assert models.wrapper.cumem_sleep_forget() == 0
        models.wrapper.wake_up(["weights"])
        assert models.not_loaded == "weight, draft.fc"
        assert not torch.equal(weight, old)
        assert torch.equal(table, before), "no loader writes buffers again"
        models.load(models.model)
        models.load(models.draft)
        assert models.not_loaded == ""
        models.wrapper.wake_up()


def test_parameters_that_vllm_keeps_over_a_sleep_are_kept_over_a_forget(models: Models) -> None:
    import torch

    if not hasattr(models.worker, "_restore_sleep_parameters"):
        pytest.skip("this vLLM keeps no parameters over a sleep")
    models.add(models.model, "weight", 64)
    fc = models.add(models.draft, "fc", 64)
    before = fc.clone()
    models.worker.model_config.sleep_preserve_parameter_names = ["draft.*"]
    models.worker.get_draft_model = lambda: models.draft
    models.wrapper.sleep(level=1)
    models.wrapper.cumem_sleep_forget()
    models.wrapper.wake_up()
    assert torch.equal(fc, before)
    assert models.not_loaded == "weight"


@backends
@pytest.mark.parametrize("poison", [False, True])
@pytest.mark.parametrize("wakes", [[None], [["weights"], ["kv_cache"]], [["kv_cache"], ["weights"]]], ids=str)
def test_parameters_that_vllm_preserves_over_level_2_are_back_and_count_as_loaded(
    models: Models, choose: Any, backend: str, poison: bool, wakes: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--sleep-preserve-parameter-names` of vLLM 0.33, which copies them to the host before, and back in the wake."""
    import torch

    if not hasattr(models.worker, "_restore_sleep_parameters"):
        pytest.skip("this vLLM keeps no parameters over a sleep")

    class OnGpu(torch.nn.Parameter):  # vLLM leaves out what is on no GPU, and takes a copy for granted
        is_cpu = False

        def detach(self) -> Any:
            return super().detach().clone()

    choose(backend)
    if poison:
        poison_what_is_dropped(monkeypatch)
    models.worker.model_config.sleep_preserve_parameter_names = ["*.frozen", "draft.*"]
    layer = torch.nn.Module()
    models.model.add_module("layer", layer)
    for module, name in ((layer, "frozen"), (layer, "trained"), (models.draft, "fc")):
        module.register_parameter(name, OnGpu(models.add(module, name, 64).data, requires_grad=False))
    for _ in range(2):
        models.wrapper.sleep(level=2)
        for tags in wakes:
            models.wrapper.wake_up(tags)
        for parameter in (layer.frozen, models.draft.fc):
            assert torch.equal(parameter.data, models.values[parameter.data_ptr()])
        assert models.not_loaded == "layer.trained"
        models.load(models.model, "layer.frozen")
        assert models.not_loaded == ""


def test_poisoned_weights_stay_poisoned_and_are_told_too(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    poison_what_is_dropped(monkeypatch)
    weight = models.add(models.model, "weight", 64)
    models.sleep_and_wake()
    assert bool(weight.isnan().all())
    assert models.not_loaded == "weight"


def test_a_run_on_weights_that_nobody_loaded_is_warned_of_once(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(loaded.logger, "warning", lambda text, *values: said.append(text % values))
    models.add(models.model, "weight", 64)
    step, nothing = (types.SimpleNamespace(total_num_scheduled_tokens=count) for count in (3, 0))
    for times in (1, 2):
        models.sleep_and_wake()
        models.worker.execute_model(nothing)
        for _ in range(3):
            models.worker.execute_model(step)
        assert len(said) == times
        assert "level 2 dropped and nobody loaded since (weight)" in said[-1]
    assert models.runs == 8
    models.sleep_and_wake()
    models.sleep_and_wake()
    models.load(models.model)
    for _ in range(3):
        models.worker.execute_model(step)
    assert len(said) == 2
    assert models.runs == 11


def test_a_model_of_an_unforeseen_kind_wakes(models: Models, caplog: pytest.LogCaptureFixture) -> None:
    models.add(models.model, "weight", 64)
    models.worker.model_runner.model = types.SimpleNamespace(
        named_parameters=lambda: 1 / 0, named_buffers=lambda: iter(())
    )
    models.sleep_and_wake()
    assert models.not_loaded == ""


def test_a_mark_that_fails_fails_the_wake(models: Models) -> None:
    from cumem_sleep import DriverError, sim

    models.add(models.model, "weight", 64)
    models.wrapper.sleep(level=2)
    sim.fail("cuMemsetD32Async", error="CUDA_ERROR_UNKNOWN")
    with pytest.raises(DriverError, match="cuMemsetD32Async"):
        models.wrapper.wake_up()
    assert CuMemAllocator.get_instance().usage()["weights"].asleep_segments
    models.wrapper.wake_up()
    assert models.not_loaded == "weight"
