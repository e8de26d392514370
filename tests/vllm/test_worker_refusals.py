"""What workers refuse asleep, in the code of vLLM's own worker and in a real server: see `refused_calls`."""

from __future__ import annotations

import pathlib
import types
from typing import Any

import pytest
from environment import Stock, skip_unless_vllm, skip_vllm_before
from ready_process import ReadyProcess
from real_worker import Contents
from support import Memory

from cumem_sleep import CuMemAllocator, InvalidState, _core
from cumem_sleep.vllm import engine_group, worker_refusals
from cumem_sleep.vllm.worker_methods import CALLS_BY_ENGINE, TOUCHES_WEIGHTS, Effect, effect_of

skip_unless_vllm()
pytestmark = pytest.mark.sim

# What vLLM's engine and others may call of its workers at any time. All else needs memory.
HARMLESS = {
    *("annotate_profile", "check_health", "list_loras", "profile", "synchronize_device", "sleep", "wake_up", "discard"),
    *("checkpoint_prepare", "checkpoint_restore", "shutdown", "get_model_inspection"),
    *("get_cache_block_size_bytes", "get_compilation_match_table", "get_encoder_timing_stats", "get_kv_cache_spec"),
    *("get_kv_connector_handshake_metadata", "get_simple_cpu_offload_num_cpu_blocks", "get_supported_tasks"),
    *("get_supported_kv_cache_layouts", "init_weight_transfer_engine", "shutdown_weight_transfer_engine"),
    *("supports_draft_weight_updates", "release_late_interaction_query_cache", "reset_mm_cache"),
    *("reset_encoder_cache", "update_max_model_len"),
}
RUNS = CALLS_BY_ENGINE - {"execute_dummy_batch"}
STEP = types.SimpleNamespace(total_num_scheduled_tokens=3, scheduled_new_reqs=[])
EMPTY = types.SimpleNamespace(total_num_scheduled_tokens=0, scheduled_new_reqs=[])


@pytest.fixture
def wrapper(worker: Any, plugged: Stock, memory: Memory, monkeypatch: pytest.MonkeyPatch) -> Any:
    """VLLM's wrapper around its real worker, of whose methods the guarded ones only say that they were called."""
    wrapper = plugged.wrapper.__new__(plugged.wrapper)
    wrapper.worker = worker
    wrapper._worker_extension_cls = wrapper.mm_receiver_cache = None
    for name in (*TOUCHES_WEIGHTS - {"get_draft_model"}, *CALLS_BY_ENGINE):
        monkeypatch.setattr(worker, name, lambda *_, name=name, **__: f"called {name}", raising=False)
    contents = Contents(worker, memory)
    memory.close()
    yield wrapper
    CuMemAllocator.get_instance().wake_up()
    contents.free()


def call(wrapper: Any, name: str, step: Any = STEP) -> Any:
    """As every executor does, those of Ray included."""
    from vllm.v1.serial_utils import run_method

    return run_method(wrapper, name, (step,) if name == "execute_model" else (), {})


@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize("name", sorted(TOUCHES_WEIGHTS - {"get_draft_model"}))  # which a sleep at level 2 calls
def test_what_touches_weights_says_which_call_comes_first(wrapper: Any, name: str, level: int) -> None:
    wrapper.sleep(level=level)
    for by in (wrapper, wrapper.worker):  # as functions that get the wrapper may call it
        with pytest.raises(
            InvalidState, match=rf"^{name} while weights sleep: wake_up\(tags=\['weights'\]\) comes first$"
        ):
            call(by, name)
    assert (CuMemAllocator.get_instance().checkpoint is not None) is (level == 3), "it did not come back for that"
    wrapper.wake_up(tags=["kv_cache"])
    with pytest.raises(InvalidState, match="comes first"):
        call(wrapper, name)
    wrapper.wake_up(tags=["weights"])
    assert call(wrapper, name) == f"called {name}"


@pytest.mark.parametrize("level", [1, 3])
def test_no_method_of_vllms_worker_touches_what_sleeps(
    wrapper: Any, worker: Any, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever methods this version has: those that are not known to be harmless raise."""
    wrapper.sleep(level=level)
    names = {name for each in type(worker).__mro__[:-1] for name in vars(each) if not name.startswith("_")}
    names = {name for name in names if callable(getattr(type(worker), name))} - {"execute_dummy_batch"}
    needy, harmless = names - HARMLESS, names & HARMLESS | {"of_an_extension"}
    assert {"execute_model", "determine_available_memory", "compile_or_warm_up_model", "load_model"} < needy
    with monkeypatch.context() as patch:
        for name in names | harmless:
            patch.setattr(worker, name, lambda *_, name=name: f"called {name}", raising=False)
        for name in sorted(needy):
            by_wrapper = name not in ("init_device", "initialize_from_config")  # whose own wants a configuration
            for by in (wrapper.worker, *[wrapper] * by_wrapper):
                with pytest.raises(InvalidState, match=rf"^{name} while (kv_cache and )?weights sleep: wake_up\("):
                    getattr(by, name)(*[STEP] * (name == "execute_model"))
        for name in sorted(harmless):
            assert getattr(wrapper.worker, name)() == f"called {name}"


@pytest.mark.parametrize("tags", [["weights"], ["kv_cache"], []])
@pytest.mark.parametrize("level", [1, 3])
def test_a_step_that_keeps_other_engines_company_does_nothing_asleep(wrapper: Any, tags: list[str], level: int) -> None:
    """An error would end the engine's core. See `test_engine_group` for engines that run."""
    wrapper.sleep(level=level)
    if tags:
        wrapper.wake_up(tags=tags)
    assert call(wrapper, "execute_dummy_batch") is None
    wrapper.wake_up()
    assert call(wrapper, "execute_dummy_batch") == "called execute_dummy_batch"


@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize("name", sorted(RUNS))
def test_what_runs_the_model_needs_all_of_it(wrapper: Any, name: str, level: int) -> None:
    wrapper.sleep(level=level)
    with pytest.raises(InvalidState, match=rf"^{name} while kv_cache and weights sleep: wake_up\(\) comes first$"):
        call(wrapper, name)
    wrapper.wake_up(tags=["weights"])
    with pytest.raises(InvalidState, match=rf"^{name} while kv_cache sleep: wake_up\(\) comes first$"):
        call(wrapper, name)
    wrapper.wake_up(tags=["kv_cache"])
    assert call(wrapper, name) == f"called {name}"


@pytest.mark.parametrize("level", [1, 3])
def test_a_step_without_tokens_passes_and_may_call_cuda(wrapper: Any, worker: Any, level: int) -> None:
    wrapper.sleep(level=level)
    worker.execute_model = lambda _: _core.driver_calls_suspended()
    assert call(wrapper, "execute_model", EMPTY) is False
    assert call(wrapper, "check_health") is None


def test_weights_that_are_awake_are_written_while_the_kv_cache_sleeps(wrapper: Any) -> None:
    wrapper.sleep(level=2)
    wrapper.wake_up(tags=["weights"])
    for name in TOUCHES_WEIGHTS - {"get_draft_model"}:
        assert call(wrapper, name) == f"called {name}"


def test_a_sleep_past_the_worker_is_seen(wrapper: Any) -> None:
    CuMemAllocator.get_instance().sleep(level=1)
    with pytest.raises(InvalidState, match="comes first"):
        call(wrapper, "execute_model")
    CuMemAllocator.get_instance().wake_up()
    assert call(wrapper, "execute_model") == "called execute_model"


def test_a_step_costs_a_flag(wrapper: Any, worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper.sleep(level=1)
    wrapper.wake_up()
    assert wrapper.worker is worker
    monkeypatch.setattr(CuMemAllocator, "asleep_tags", property(lambda _: pytest.fail("asked for segments")))
    for _ in range(3):
        assert call(wrapper, "execute_model") == "called execute_model"
    assert wrapper.worker is worker


def test_of_several_workers_the_last_one_says_it(wrapper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Executors read the answers up to the first error, and would take the others for those to the next call."""
    wrapper.sleep(level=1)
    monkeypatch.setattr(engine_group, "is_told_by_last", lambda worker: True)
    assert call(wrapper, "update_weights") is None
    with pytest.raises(InvalidState):  # of a step they read one worker's answer alone
        call(wrapper, "execute_model")


def test_a_models_own_load_weights_needs_admin_token(wrapper: Any, worker: Any) -> None:
    loads: list[Any] = []
    model = types.SimpleNamespace(load_weights=loads.append)
    worker_refusals.watch(model)
    worker_refusals.watch(model)
    model.load_weights("a")
    wrapper.sleep(level=1)
    with pytest.raises(InvalidState, match="load_weights while weights sleep"):
        model.load_weights("b")
    wrapper.wake_up(tags=["weights"])
    model.load_weights("c")
    assert loads == ["a", "c"]


def test_a_loaded_model_is_watched(wrapper: Any, worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    worker.model_runner.model.load_weights = lambda *_: None
    monkeypatch.setattr(worker, "load_model", lambda: None)
    wrapper.load_model()
    assert worker.model_runner.model.load_weights.refuses_asleep


def test_the_gate_refuses_all_that_a_worker_refuses() -> None:
    for name in (*TOUCHES_WEIGHTS, *CALLS_BY_ENGINE, "elastic_ep_execute", "determine_available_memory", "load_model"):
        assert effect_of(name) not in (Effect.HARMLESS, Effect.DEEPENS), name


@pytest.mark.timeout(600)
def test_in_a_real_server_the_calls_answer_and_the_engine_lives(
    ready_process: ReadyProcess, tmp_path: pathlib.Path
) -> None:
    skip_vllm_before((0, 18))
    ready_process.check("refused_calls.py", tmp_path / "log")
