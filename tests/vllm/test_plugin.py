"""The plugin in a real vLLM, without a GPU: is found, replaces what it must, stands back where it does not fit."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import importlib
import importlib.metadata
import importlib.util
import io
import logging
import pathlib
import sys
import types
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
from environment import Stock, in_fork, skip_unless_vllm
from fresh_process import Findings
from ready_process import ReadyProcess

from cumem_sleep import CuMemAllocator, InvalidArgument, InvalidState, Settings, sim
from cumem_sleep.vllm import compatibility, plugin, seams

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
        def state() -> Any:
            return dict(vars(plugged.wrapper)), set(plugged.registry or ()), plugged.engine_args.create_engine_config

        before = state()
        load()
        plugin.register()
        assert state() == before
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

    def test_all_that_the_layer_needs_is_where_doctor_looks(self, vllm_version: tuple[int, int]) -> None:
        distribution = importlib.metadata.distribution("vllm")
        states = seams.examined(pathlib.Path(str(distribution.locate_file("vllm"))), vllm_version[1])
        assert set(states.values()) == {"found"}, states

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
        assert "CUMEM_SLEEP_" not in (compatibility.ray_prefixes() or ()), "nothing is copied to workers on Ray"

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

    def test_bad_values_do_not_stop_the_command(self, ready_process: ReadyProcess, tmp_path: pathlib.Path) -> None:
        command = importlib.util.find_spec("vllm.entrypoints.cli.main")
        assert command is not None
        assert command.origin is not None
        bad = dict.fromkeys(self.VARIABLES, "nonsense")
        said = ready_process.check(command.origin, tmp_path / "log", "--version", **bad)
        assert said.split()[-1] == importlib.metadata.version("vllm")

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
            assert plugin.why_not_active().startswith("its version 0.99.0 is not known"), "which the gate says"
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


GONE = object()
# What vLLM may have otherwise, and what is said of it.
MISFITS: list[tuple[str, str, object, str]] = [
    ("allocator", "defragment", lambda self: None, "CuMemAllocator.defragment is new"),
    ("allocator", "policy", "lru", "CuMemAllocator.policy is new"),
    ("allocator", "sleep", lambda self, offload_tags=None, compress=False: None, "takes 'compress', which is new"),
    ("allocator", "wake_up", lambda self, *tags: None, "CuMemAllocator.wake_up takes 'tags' differently (*tags)"),
    ("allocator", "discard", lambda self, tags="all": None, "discard takes 'tags' differently (tags='all')"),
    ("allocator", "instance", object(), "its own CuMemAllocator is in use already"),
    ("cumem", "CuMemAllocator", GONE, "vllm.device_allocator.cumem.CuMemAllocator cannot be imported"),
    ("wrapper", "compile_or_warm_up_model", Stock.restore, "WorkerWrapperBase.compile_or_warm_up_model is new"),
    ("wrapper", "__getattr__", GONE, "its workers warm up in another way"),
    ("wrapper", "cumem_sleep_status", 7, "looking at it failed with AttributeError"),
    ("worker", "compile_or_warm_up_model", GONE, "its workers warm up in another way"),
    ("worker_base", "WorkerWrapperBase", GONE, "vllm.v1.worker.worker_base cannot be used"),
    ("factory", "register_backend", lambda name, path, kind, rank: None, "takes other arguments (missing a required"),
    ("factory", "_registry", None, "its SleepModeBackendFactory has no registry"),
    ("backend", "__abstractmethods__", frozenset({"compact"}), "its SleepModeBackend asks for compact"),
]
NOT_KNOWN = "its version 0.99.0 is not known to work with it; known versions are 0.11 to 0.33, but for 0.14 to 0.16"
STAYS = (
    "cumem-sleep does not serve this vLLM, whose own sleep mode stays: {}."
    " ({}CUMEM_SLEEP_DISABLE=1 silences this message.)"
)
SERVES = (
    "cumem-sleep serves this vLLM because CUMEM_SLEEP_VLLM_UNTESTED is set: {}."
    " Everything that the layer calls is there; nothing else was tested"
)


class TestFit:
    """What the layer relies on is there; what is not there is named, and vLLM's own allocator stays."""

    def test_this_version(self, stock: Stock) -> None:
        assert compatibility.misfit() is None

    @pytest.mark.parametrize(
        ("version", "fits"),
        [
            ("0.11.0", True),
            ("0.26.1.dev3+g0123abc", True),  # built from source
            ("0.26.0+fork.cu129", True),
            ("0.33.1rc1", True),
            ("0.13.1", True),
            ("0.14.0", False),  # weights are loaded outside of their pool
            ("0.16.2", False),
            ("0.17.0", True),
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
            assert "known versions are 0.11 to 0.33, but for 0.14 to 0.16" in misfit

    def test_a_subclass(self, stock: Stock) -> None:
        """It would go on allocating from vLLM's own layer."""
        heir = type("Heir", (stock.allocator,), {"__module__": "trainer"})
        misfit = compatibility.misfit()
        del heir
        gc.collect()  # classes are part of cycles
        assert "its own CuMemAllocator has subclasses (trainer.Heir), which would bypass this layer" in (misfit or "")
        assert compatibility.misfit() is None

    @pytest.mark.parametrize(("owner", "name", "value", "said"), MISFITS, ids=[f"{each[:2]}" for each in MISFITS])
    def test_what_is_otherwise_is_named(
        self, stock: Stock, monkeypatch: pytest.MonkeyPatch, owner: str, name: str, value: object, said: str
    ) -> None:
        from vllm.v1.worker import worker_base

        owners = {"allocator": stock.allocator, "cumem": stock.cumem, "wrapper": stock.wrapper}
        owners |= {"worker_base": worker_base, "worker": worker_base.WorkerBase}
        if factory := compatibility._backend_factory():
            from cumem_sleep.vllm.backend import CumemSleepBackend

            owners |= {"factory": factory, "backend": CumemSleepBackend}
        if owner not in owners:
            pytest.skip("this vLLM has no registry of sleep-mode backends")
        if value is GONE:
            monkeypatch.delattr(owners[owner], name)
        else:
            monkeypatch.setattr(owners[owner], name, value, raising=False)
        assert said in (compatibility.misfit() or "")

    @pytest.mark.parametrize(
        ("untested", "fits", "said"),
        [
            (False, True, STAYS.format(NOT_KNOWN, "CUMEM_SLEEP_VLLM_UNTESTED=1 tries it anyway, ")),
            (True, False, STAYS.format("its CuMemAllocator.defragment is new", "")),
            (True, True, SERVES.format(NOT_KNOWN)),
        ],
    )
    def test_of_the_servers_processes_the_first_says_what_becomes_of_an_unknown_version(
        self, stock: Stock, monkeypatch: pytest.MonkeyPatch, logged: io.StringIO, untested: bool, fits: bool, said: str
    ) -> None:
        monkeypatch.setattr("vllm.__version__", "0.99.0")
        if untested:
            monkeypatch.setenv("CUMEM_SLEEP_VLLM_UNTESTED", "1")
        if not fits:
            monkeypatch.setattr(stock.allocator, "defragment", lambda self: None, raising=False)
        load()
        load()
        in_fork(load)
        assert stock.is_untouched() != (untested and fits)
        assert logged.getvalue().splitlines() == [said]


class TestWhatVersionsLack:
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
        logging.getLogger("vllm").setLevel(logging.WARNING)
        logging.getLogger("cumem_sleep").info("not here")
        assert len(logged.getvalue().splitlines()) == 2, "vLLM sets the level"
        assert not logging.getLogger("cumem_sleep").propagate  # not a second time, by the root's handlers

    def test_where_vllm_is_configured_late(self, stock: Stock, request: pytest.FixtureRequest) -> None:
        """VLLM 0.33 does so after it has loaded the plugins."""
        load()
        logged = request.getfixturevalue("logged")
        logging.getLogger("cumem_sleep").info("here")
        assert logged.getvalue() == "here\n"

    def test_handlers_and_levels_of_the_user_stay(self, stock: Stock) -> None:
        ours, mine = logging.getLogger("cumem_sleep"), logging.NullHandler()
        ours.addHandler(mine)
        load()
        assert (ours.handlers, ours.level, ours.propagate) == ([mine], logging.NOTSET, True)
        ours.removeHandler(mine)
        ours.setLevel(logging.ERROR)
        load()
        assert ours.level == logging.ERROR
