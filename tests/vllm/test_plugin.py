"""The plugin in a real vLLM, without a GPU: is found, replaces what it must, stands back where it does not fit."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import importlib
import importlib.metadata
import io
import logging
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing.connection import Connection
from typing import Any

import pytest
from environment import Stock, in_fork, skip_unless_vllm
from fresh_process import Findings

from cumem_sleep import CuMemAllocator, InvalidArgument, InvalidState, Settings, sim
from cumem_sleep.vllm import compatibility, plugin

skip_unless_vllm()
pytestmark = pytest.mark.sim

PAGE = 2 << 20


@pytest.fixture(scope="session")
def findings(spawned: Connection, vllm_version: tuple[int, int]) -> Findings:
    assert spawned.poll(600), "the spawned process does not answer"
    found: Findings = spawned.recv()
    assert found.error == ""
    return found


@pytest.fixture
def logged(stock: Stock) -> Iterator[io.StringIO]:
    """What the layer says through vLLM's logger, configured after the plugin was loaded or before."""
    text, theirs = io.StringIO(), logging.getLogger("vllm")
    handler = logging.StreamHandler(text)
    handler.addFilter(logging.Filter("cumem_sleep"))
    level = theirs.level
    theirs.addHandler(handler)
    theirs.setLevel(logging.INFO)
    yield text
    theirs.removeHandler(handler)
    theirs.setLevel(level)


def load() -> None:
    """As vLLM does at the start of every process."""
    import vllm.plugins

    vllm.plugins.plugins_loaded = False
    vllm.plugins.load_general_plugins()


class TestLoading:
    @pytest.mark.parametrize("setting", [None, "0", "nonsense"])
    def test_the_engine_core_is_vllms_own_unless_its_kv_cache_is_to_survive(
        self, stock: Stock, monkeypatch: pytest.MonkeyPatch, setting: str | None
    ) -> None:
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.engine.core import EngineCore

        if setting is not None:
            monkeypatch.setenv("CUMEM_SLEEP_KEEP_KV_BYTES", setting)
        load()
        methods = [*vars(EngineCore).values(), *vars(Scheduler).values()]
        assert not any(hasattr(method, "keeps_kv") for method in methods)

    def test_is_found_by_its_entry_point(self) -> None:
        (entry_point,) = [
            point
            for point in importlib.metadata.entry_points(group="vllm.general_plugins")
            if point.name == "cumem_sleep"
        ]
        assert entry_point.load() is plugin.register

    @pytest.mark.parametrize("name", plugin.ENTRY_POINTS)
    def test_is_found_by_either_spelling(self, stock: Stock, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        monkeypatch.setenv("VLLM_PLUGINS", name)
        load()
        assert not stock.is_untouched()

    def test_workers_on_ray_get_the_settings(self, stock: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
        """VLLM copies only what it knows, and what it is told, to workers on a cluster that runs already."""
        monkeypatch.setenv("CUMEM_SLEEP_COMPRESS", "auto")
        load()
        load()
        if compatibility.ray_prefixes() is None:
            pytest.skip("before 0.18 no prefix can be named")
        from vllm.ray.ray_env import get_env_vars_to_copy

        assert {"CUMEM_SLEEP_COMPRESS", "VLLM_SERVER_DEV_MODE"} <= get_env_vars_to_copy()
        stock.restore()
        assert "CUMEM_SLEEP_COMPRESS" not in get_env_vars_to_copy()

    def test_a_layer_that_does_not_serve_has_nothing_copied(
        self, stock: Stock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(plugin.DISABLE, "1")
        load()
        assert stock.is_untouched()
        assert "CUMEM_SLEEP_" not in (compatibility.ray_prefixes() or ())

    def test_the_key_of_compiled_code_stays(self, stock: Stock) -> None:
        """Otherwise all that was compiled before the plugin was installed would be compiled again."""
        import vllm.envs

        factors = getattr(vllm.envs, "compile_factors", None) or getattr(vllm.envs, "compute_hash", None)
        if factors is None:
            pytest.skip("this vLLM says in no such way what compiled code depends on")
        before = factors()
        load()
        assert not stock.is_untouched()
        assert factors() == before

    def test_replaces_the_allocator_where_vllm_looks_for_it(self, plugged: Stock) -> None:
        from vllm.device_allocator.cumem import CuMemAllocator as Imported

        assert Imported is CuMemAllocator
        assert not CuMemAllocator._prepares_after_pools
        import vllm.device_allocator

        if hasattr(vllm.device_allocator, "get_mem_allocator_instance"):
            assert vllm.device_allocator.get_mem_allocator_instance() is CuMemAllocator.get_instance()

    def test_nothing_in_vllm_keeps_the_class_that_was_replaced(self, stock: Stock) -> None:
        """The other modules import it when they need it; one that holds it would go by the plugin."""
        holders = [
            f"{module.__name__}.{name}"
            for module in list(sys.modules.values())
            if getattr(module, "__name__", "").startswith("vllm") and module is not stock.cumem
            for name, value in list(vars(module).items())
            if value is stock.allocator
        ]
        assert holders == []

    def test_modules_that_imported_the_class_before_get_the_new_one(
        self, stock: Stock, monkeypatch: pytest.MonkeyPatch, logged: io.StringIO
    ) -> None:
        early: Any = types.ModuleType("early")
        early.CuMemAllocator = early.Allocator = stock.allocator
        early.other = other = object()
        monkeypatch.setitem(sys.modules, "early", early)
        monkeypatch.setitem(sys.modules, "not_a_module", None)
        load()
        assert early.CuMemAllocator is early.Allocator is CuMemAllocator
        assert early.other is other
        assert "in modules that had already imported it: early.Allocator, early.CuMemAllocator\n" in logged.getvalue()

    def test_no_lazy_module_is_loaded_by_looking_for_the_class(
        self, stock: Stock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Lazy(types.ModuleType):
            def __getattribute__(self, name: str) -> object:
                raise AssertionError(f"somebody asked for {name}")

        monkeypatch.setitem(sys.modules, "lazy", Lazy("lazy"))
        assert compatibility.replace_allocator() == []
        assert stock.cumem.CuMemAllocator is CuMemAllocator

    def test_the_allocator_can_be_read_as_vllms_own(self, plugged: Stock) -> None:
        """As vLLM's tests do, which count what is mapped and backed up."""
        allocator: Any = CuMemAllocator(Settings(driver="sim"))
        assert allocator.current_tag == plugged.allocator.default_tag
        with allocator.use_memory_pool("weights"):
            assert allocator.current_tag == "weights"
            weights = allocator.malloc(PAGE)
        cache = [allocator.malloc(2 * PAGE, "kv_cache") for _ in range(2)]
        assert {address: (data.handle[:3], data.tag) for address, data in allocator.pointer_to_data.items()} == {
            weights: ((0, PAGE, weights), "weights"),
            **{address: ((0, 2 * PAGE, address), "kv_cache") for address in cache},
        }
        for data in allocator.pointer_to_data.values():
            assert not data.is_asleep
            assert data.cpu_backup_tensor is None
            assert all(hasattr(data, field.name) for field in dataclasses.fields(plugged.cumem.AllocationData))
        allocator.sleep(level=1)
        data = allocator.pointer_to_data
        assert len(data[weights].cpu_backup_tensor) == PAGE
        assert data[cache[0]].cpu_backup_tensor is None
        allocator.wake_up(["kv_cache"])
        assert {address: data.is_asleep for address, data in allocator.pointer_to_data.items()} == {
            weights: True,
            **dict.fromkeys(cache, False),
        }
        allocator.free(cache[0])
        assert {tag: len(pools) for tag, pools in allocator.allocator_and_pools.items()} == {
            "weights": 1,
            "kv_cache": 1,
        }

    def test_twice_is_harmless(self, plugged: Stock) -> None:
        before = dict(vars(plugged.wrapper)), set(plugged.registry or ())
        load()
        plugin.register()
        assert (dict(vars(plugged.wrapper)), set(plugged.registry or ())) == before
        assert plugged.cumem.CuMemAllocator is CuMemAllocator

    def test_in_a_fresh_process(self, findings: Findings) -> None:
        assert findings.replaced
        assert not findings.cuda_initialized
        assert findings.threads == 0

    def test_costs_few_imports(self, findings: Findings) -> None:
        """An engine and its workers import the rest anyway."""
        assert {name for name in findings.imported if not name.startswith("vllm.device_allocator")} <= {
            "vllm.cumem_allocator",
            "vllm.distributed.device_communicators.cuda_wrapper",
        }

    def test_calls_no_driver(self, stock: Stock) -> None:
        calls = dict(sim.stats().calls)
        load()
        assert dict(sim.stats().calls) == calls
        assert CuMemAllocator.instance is None


class TestLeftAlone:
    """Nothing of vLLM changes."""

    def test_other_plugins_only(self, findings: Findings) -> None:
        assert findings.ours_without_plugins == []

    def test_disabled_in_a_fresh_process(self, findings: Findings) -> None:
        assert findings.vllm_when_disabled == []

    @pytest.mark.parametrize("value", ["1", "true", " ON "])
    def test_disabled(self, stock: Stock, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
        monkeypatch.setenv("CUMEM_SLEEP_DISABLE", value)
        monkeypatch.setenv("CUMEM_SLEEP_VERIFY", "nonsense")
        load()
        assert stock.is_untouched()

    @pytest.mark.parametrize("value", ["", "0", "off"])
    def test_not_disabled(self, stock: Stock, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
        monkeypatch.setenv("CUMEM_SLEEP_DISABLE", value)
        load()
        assert not stock.is_untouched()

    @pytest.mark.parametrize("platform", ["CPU", "ROCM", "XPU", "UNSPECIFIED"])
    def test_without_cuda(
        self, stock: Stock, monkeypatch: pytest.MonkeyPatch, logged: io.StringIO, platform: str
    ) -> None:
        import vllm.platforms
        from vllm.platforms.interface import Platform, PlatformEnum

        kind = type(f"{platform}Platform", (Platform,), {"_enum": PlatformEnum[platform]})
        monkeypatch.setattr(vllm.platforms, "_current_platform", kind())
        monkeypatch.setenv("CUMEM_SLEEP_VERIFY", "nonsense")
        load()
        assert stock.is_untouched()
        assert logged.getvalue() == ""


class TestStart:
    """A server that this layer cannot serve as it was told stops at its start, and nothing else stops."""

    VARIABLES = (
        *("CUMEM_SLEEP_DISABLE", "CUMEM_SLEEP_VLLM_UNTESTED"),
        *("CUMEM_SLEEP_PREPARE", "CUMEM_SLEEP_HOST_BUDGET_BYTES"),
    )

    @pytest.fixture
    def configured(self, stock: Stock, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
        """The engines that vLLM configured."""
        engines: list[dict[str, Any]] = []
        monkeypatch.setattr(stock.engine_args, "create_engine_config", lambda self, **named: engines.append(named))
        return engines

    def start(self, stock: Stock, **arguments: Any) -> None:
        """As an API server does."""
        engine_args = stock.engine_args(model="model", **arguments)  # loads the plugins
        plugin.register()
        engine_args.create_engine_config(headless=True)

    @pytest.mark.parametrize("variable", VARIABLES)
    def test_a_bad_value_stops_what_would_sleep(
        self, stock: Stock, monkeypatch: pytest.MonkeyPatch, configured: list[dict[str, Any]], variable: str
    ) -> None:
        monkeypatch.setenv(variable, "nonsense")
        load()
        for option in compatibility.WHAT_ENABLES_THE_ALLOCATOR:
            if hasattr(stock.engine_args, option):
                with pytest.raises(InvalidArgument, match=f"{variable}='nonsense'"):
                    self.start(stock, **{option: True})
        assert configured == []
        self.start(stock)
        assert configured == [{"headless": True}]

    def test_a_bad_value_in_one_worker_stops_it_at_its_first_memory(
        self, stock: Stock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CUMEM_SLEEP_PREPARE", "nonsense")
        load()
        with pytest.raises(InvalidArgument, match="CUMEM_SLEEP_PREPARE='nonsense'"):
            stock.cumem.CuMemAllocator.get_instance()

    def test_bad_values_do_not_stop_the_command(self, stock: Stock) -> None:
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "--version"]
        environment = {**os.environ, **dict.fromkeys(self.VARIABLES, "nonsense")}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split()[-1] == importlib.metadata.version("vllm")

    def test_good_values(self, stock: Stock, configured: list[dict[str, Any]]) -> None:
        self.start(stock, enable_sleep_mode=True)
        assert configured == [{"headless": True}]

    def test_a_misfit_is_no_reason_to_stop(
        self, stock: Stock, monkeypatch: pytest.MonkeyPatch, configured: list[dict[str, Any]]
    ) -> None:
        monkeypatch.setenv("CUMEM_SLEEP_PREPARE", "nonsense")  # nobody reads it then
        with monkeypatch.context() as context:
            context.setattr("vllm.__version__", "0.99.0")
            self.start(stock, enable_sleep_mode=True)
        monkeypatch.setenv("CUMEM_SLEEP_DISABLE", "1")
        self.start(stock, enable_sleep_mode=True)
        assert configured == [{"headless": True}] * 2

    def test_the_backend_by_name_needs_the_layer(
        self, stock: Stock, monkeypatch: pytest.MonkeyPatch, configured: list[dict[str, Any]]
    ) -> None:
        if not hasattr(stock.engine_args, "sleep_mode_backend"):
            pytest.skip("this vLLM chooses no backend by name")
        by_name = {"enable_sleep_mode": True, "sleep_mode_backend": "cumem_sleep"}
        with monkeypatch.context() as context:
            context.setenv("CUMEM_SLEEP_DISABLE", "1")
            with pytest.raises(
                InvalidState, match="--sleep-mode-backend cumem_sleep cannot be used: CUMEM_SLEEP_DISABLE=1"
            ):
                self.start(stock, **by_name)
        with monkeypatch.context() as context:
            context.setattr("vllm.__version__", "0.99.0")
            with pytest.raises(InvalidState, match=r"cannot be used: its version 0\.99\.0 is not known"):
                self.start(stock, **by_name)
        with monkeypatch.context() as context:
            context.setattr(compatibility, "is_cuda", lambda: False)
            with pytest.raises(InvalidState, match="cannot be used: vLLM does not run on CUDA here"):
                self.start(stock, **by_name)
        assert configured == []
        assert stock.is_untouched()
        self.start(stock, **by_name)
        assert len(configured) == 1

    def test_twice_asks_once(self, stock: Stock, configured: list[dict[str, Any]]) -> None:
        load()
        once = stock.engine_args.create_engine_config
        load()
        assert stock.engine_args.create_engine_config is once


class TestFit:
    """What the layer relies on is there; what is not there is named, and vLLM's own allocator stays."""

    def test_this_version(self, stock: Stock) -> None:
        assert compatibility.misfit() is None

    def test_once_plugged_in(self, plugged: Stock) -> None:
        assert compatibility.misfit() is None

    @pytest.mark.parametrize(
        ("version", "fits"),
        [
            ("0.11.0", True),
            ("0.26.1.dev3+g0123abc", True),  # built from source
            ("0.26.0+fork.cu129", True),
            ("0.33.1rc1", True),
            ("0.10.2", False),
            ("0.34.0", False),
            ("0.34.0rc1.dev5+g0123abc", False),
            ("1.0.0", False),
            ("0.1.dev1+g0123abc", False),  # built from source without the tags
            ("dev", False),  # vLLM's word where it cannot tell
            ("", False),
        ],
    )
    def test_versions(self, stock: Stock, monkeypatch: pytest.MonkeyPatch, version: str, fits: bool) -> None:
        import vllm

        monkeypatch.setattr(vllm, "__version__", version)
        misfit = compatibility.misfit()
        assert (misfit is None) == fits
        if misfit:
            assert version in misfit
            assert "known versions are 0.11 to 0.33" in misfit

    def change_method(self, stock: Stock, monkeypatch: pytest.MonkeyPatch, name: str, method: object) -> str:
        monkeypatch.setattr(stock.allocator, name, method, raising=False)
        misfit = compatibility.misfit()
        assert misfit
        return misfit

    def test_a_new_method(self, stock: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
        assert "CuMemAllocator.defragment is new" in self.change_method(
            stock, monkeypatch, "defragment", lambda self: None
        )

    def test_a_new_method_of_a_base_class(self, stock: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
        class Base:
            def defragment(self) -> None: ...

        with monkeypatch.context() as context:
            context.setattr(stock.cumem, "CuMemAllocator", type("CuMemAllocator", (stock.allocator, Base), {}))
            assert "CuMemAllocator.defragment is new" in (compatibility.misfit() or "")
        gc.collect()  # classes are part of cycles

    def test_a_subclass(self, stock: Stock) -> None:
        """It would go on allocating from vLLM's own layer."""
        heir = type("Heir", (stock.allocator,), {"__module__": "trainer"})
        misfit = compatibility.misfit()
        del heir
        gc.collect()
        assert "its own CuMemAllocator has subclasses (trainer.Heir), which would bypass this layer" in (misfit or "")
        assert compatibility.misfit() is None

    def test_a_new_parameter(self, stock: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
        def sleep(self: object, offload_tags: object = None, compress: bool = False) -> None: ...

        misfit = self.change_method(stock, monkeypatch, "sleep", sleep)
        assert "CuMemAllocator.sleep takes 'compress', which is new" in misfit

    def test_a_parameter_of_another_kind(self, stock: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
        def wake_up(self: object, *tags: str) -> None: ...

        misfit = self.change_method(stock, monkeypatch, "wake_up", wake_up)
        assert "CuMemAllocator.wake_up takes 'tags' differently (*tags: " in misfit

    def test_a_parameter_that_can_be_left_out(self, stock: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
        def discard(self: object, tags: str = "kv_cache") -> None: ...

        misfit = self.change_method(stock, monkeypatch, "discard", discard)
        assert "CuMemAllocator.discard takes 'tags' differently (tags: " in misfit

    def test_a_new_attribute(self, stock: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
        assert "CuMemAllocator.policy is new" in self.change_method(stock, monkeypatch, "policy", "lru")

    def test_no_allocator(self, stock: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(stock.cumem, "CuMemAllocator")
        assert "vllm.device_allocator.cumem.CuMemAllocator cannot be imported" in (compatibility.misfit() or "")
        for broken in (None, BrokenModule()):
            monkeypatch.setitem(sys.modules, "vllm.device_allocator.cumem", broken)
            assert "vllm.device_allocator.cumem.CuMemAllocator cannot be imported" in (compatibility.misfit() or "")

    def test_its_allocator_is_in_use(self, stock: Stock) -> None:
        stock.allocator.instance = object()
        assert "its own CuMemAllocator is in use already" in (compatibility.misfit() or "")

    def test_other_workers(self, stock: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm.v1.worker import worker_base

        with monkeypatch.context() as context:
            context.setattr(stock.wrapper, "compile_or_warm_up_model", Stock.restore, raising=False)
            assert "WorkerWrapperBase.compile_or_warm_up_model is new" in (compatibility.misfit() or "")
        with monkeypatch.context() as context:
            context.delattr(stock.wrapper, "init_device")
            assert "its WorkerWrapperBase.init_device is gone" in (compatibility.misfit() or "")
        with monkeypatch.context() as context:
            context.delattr(stock.wrapper, "__getattr__")
            assert "its workers warm up in another way" in (compatibility.misfit() or "")
        with monkeypatch.context() as context:
            context.delattr(worker_base.WorkerBase, "compile_or_warm_up_model")
            assert "its workers warm up in another way" in (compatibility.misfit() or "")
        monkeypatch.delattr(worker_base, "WorkerWrapperBase")
        assert "vllm.v1.worker.worker_base cannot be used" in (compatibility.misfit() or "")

    def test_another_registry(self, stock: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
        factory = compatibility._backend_factory()
        if factory is None:
            pytest.skip("this vLLM has no registry of sleep-mode backends")
        with monkeypatch.context() as context:
            context.setattr(factory, "register_backend", lambda name, module_path, class_name, rank: None)
            assert "register_backend takes other arguments (missing a required" in (compatibility.misfit() or "")
        with monkeypatch.context() as context:
            context.setattr(factory, "_registry", None)
            assert "its SleepModeBackendFactory has no registry" in (compatibility.misfit() or "")
        from cumem_sleep.vllm.backend import CumemSleepBackend

        monkeypatch.setattr(CumemSleepBackend, "__abstractmethods__", frozenset({"compact"}))
        assert "its SleepModeBackend asks for compact" in (compatibility.misfit() or "")

    def test_what_nobody_thought_of(self, stock: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(stock.wrapper, "cumem_sleep_status", 7, raising=False)
        assert "looking at it failed with AttributeError" in (compatibility.misfit() or "")

    def test_its_own_layer_stays_and_one_warning_says_why(
        self, stock: Stock, monkeypatch: pytest.MonkeyPatch, logged: io.StringIO
    ) -> None:
        import vllm

        monkeypatch.setattr(vllm, "__version__", "0.99.0")
        load()
        load()
        in_fork(load)  # of the server's processes, only the first says so
        assert stock.is_untouched()
        assert logged.getvalue().splitlines() == [
            "cumem-sleep does not serve this vLLM, whose own sleep mode stays: its version 0.99.0 is not known to work"
            " with it; known versions are 0.11 to 0.33. (CUMEM_SLEEP_VLLM_UNTESTED=1 tries it anyway,"
            " CUMEM_SLEEP_DISABLE=1 silences this message.)"
        ]

    def test_an_untested_version_if_told_so(
        self, stock: Stock, monkeypatch: pytest.MonkeyPatch, logged: io.StringIO
    ) -> None:
        monkeypatch.setattr("vllm.__version__", "0.99.0")
        monkeypatch.setenv("CUMEM_SLEEP_VLLM_UNTESTED", "1")
        load()
        load()
        in_fork(load)
        assert stock.cumem.CuMemAllocator is CuMemAllocator
        assert logged.getvalue().splitlines() == [
            "cumem-sleep serves this vLLM because CUMEM_SLEEP_VLLM_UNTESTED is set: its version 0.99.0 is not known to"
            " work with it; known versions are 0.11 to 0.33. Everything that the layer calls is there; nothing else was"
            " tested"
        ]

    def test_an_untested_version_still_has_to_fit(
        self, stock: Stock, monkeypatch: pytest.MonkeyPatch, logged: io.StringIO
    ) -> None:
        monkeypatch.setattr("vllm.__version__", "0.99.0")
        monkeypatch.setattr(stock.allocator, "defragment", lambda self: None, raising=False)
        monkeypatch.setenv("CUMEM_SLEEP_VLLM_UNTESTED", "1")
        load()
        assert stock.is_untouched()
        assert logged.getvalue().splitlines() == [
            "cumem-sleep does not serve this vLLM, whose own sleep mode stays: its CuMemAllocator.defragment is new."
            " (CUMEM_SLEEP_DISABLE=1 silences this message.)"
        ]


class Pool:
    entered: tuple[str, ...] = ()

    @contextmanager
    def _maybe_get_memory_pool_context(self, tag: str) -> Iterator[None]:
        self.entered += (tag,)
        yield
        self.entered += ("left",)


class PoolOnlyMade(Pool):
    """As a worker of vLLM 0.14 to 0.16."""

    def load_model(self) -> str:
        with self._maybe_get_memory_pool_context(tag="weights") and nullcontext():
            self.entered += ("loads",)
            return "loaded"


class PoolEntered(Pool):
    """As one of the others."""

    def load_model(self) -> str:
        with self._maybe_get_memory_pool_context(tag="weights"), nullcontext():
            self.entered += ("loads",)
            return "loaded"


class TestWhatVersionsLack:
    @pytest.mark.parametrize("kind", [PoolOnlyMade, PoolEntered, type("Heir", (PoolOnlyMade,), {})])
    def test_weights_are_loaded_inside_their_pool(self, plugged: Stock, kind: type) -> None:
        wrapper = plugged.wrapper.__new__(plugged.wrapper)
        wrapper.worker = kind()
        assert wrapper.load_model() == "loaded"
        assert wrapper.worker.entered == ("weights", "loads", "left")

    @pytest.mark.parametrize("call", ["sleep", "pause_generation"])
    def test_the_senders_cache_of_multimodal_inputs_is_cleared_with_the_engines(
        self, stock: Stock, call: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.engine.llm_engine import LLMEngine

        if not hasattr(AsyncLLM, call):
            pytest.skip(f"this vLLM has no {call}")
        for kind, name in ((AsyncLLM, "sleep"), (AsyncLLM, "pause_generation"), (LLMEngine, "sleep")):
            if hasattr(kind, name):
                monkeypatch.setattr(kind, name, getattr(kind, name))  # restored at the end
        for _ in range(2):
            plugin.check_engine_arguments(types.SimpleNamespace(enable_sleep_mode=True))
        done: list[str] = []

        async def clear() -> None:
            done.append("sender")

        async def engines(*_: Any, **__: Any) -> None:
            done.append("engine")

        client = types.SimpleNamespace(
            renderer=types.SimpleNamespace(clear_mm_cache=lambda: done.append("sender"), clear_mm_cache_async=clear),
            engine_core=types.SimpleNamespace(
                sleep_async=engines,
                pause_scheduler_async=engines,
                pause_generation_async=engines,  # from 0.33 on
                sleep=lambda *_: done.append("engine"),
            ),
            logger_manager=None,
            reset_prefix_cache=engines,  # before 0.14
        )
        asyncio.run(getattr(AsyncLLM, call)(client))
        assert done[0] == "sender"
        assert "engine" in done
        if call == "sleep":
            done.clear()
            LLMEngine.sleep(client)
            assert done == ["sender", "engine"]


class BrokenModule(types.ModuleType):
    """As a vLLM whose C++ part cannot be loaded."""

    def __init__(self) -> None:
        super().__init__("vllm.device_allocator.cumem")

    def __getattr__(self, name: str) -> object:
        raise OSError("libcudart is not loaded in the current process")


class TestLog:
    def test_goes_where_vllm_writes(self, stock: Stock, logged: io.StringIO) -> None:
        load()
        load()
        allocator = CuMemAllocator.get_instance()
        allocator.malloc(PAGE, "weights")
        allocator.sleep(1)
        lines = logged.getvalue().splitlines()
        assert "cumem-sleep: memory pools come from this layer" in lines[0]
        assert "sleep: freed 2.00 MiB" in lines[1]
        assert len(lines) == 2
        assert not logging.getLogger("cumem_sleep").propagate  # not a second time, by the root's handlers

    def test_where_vllm_is_configured_late(self, stock: Stock, request: pytest.FixtureRequest) -> None:
        """VLLM 0.33 does so after it has loaded the plugins."""
        load()
        logged = request.getfixturevalue("logged")
        logging.getLogger("cumem_sleep").info("here")
        assert logged.getvalue() == "here\n"

    def test_vllm_sets_the_level(self, stock: Stock, logged: io.StringIO) -> None:
        load()
        logging.getLogger("vllm").setLevel(logging.WARNING)
        logging.getLogger("cumem_sleep").info("not here")
        assert logged.getvalue() == ""

    def test_fits_its_format(self) -> None:
        from vllm.logger import _FORMAT
        from vllm.logging_utils import NewLineFormatter

        record = logging.LogRecord("cumem_sleep", logging.INFO, plugin.__file__, 1, "first\nsecond", (), None)
        record.vllm_process_name = "EngineCore"
        assert NewLineFormatter(_FORMAT).format(record).endswith("second")

    def test_handlers_and_levels_of_the_user_stay(self, stock: Stock) -> None:
        ours, mine = logging.getLogger("cumem_sleep"), logging.NullHandler()
        ours.addHandler(mine)
        load()
        assert (ours.handlers, ours.level, ours.propagate) == ([mine], logging.NOTSET, True)
        ours.removeHandler(mine)
        ours.setLevel(logging.ERROR)
        load()
        assert ours.level == logging.ERROR
