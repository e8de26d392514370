"""What SGLang, slime, miles and verl call of torch_memory_saver, as they call it.

The versions whose calls these are: docs/torch-memory-saver.md.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import subprocess
from collections.abc import Iterator

import pytest
from support import AWAKE, BACKED_UP, DROPPED, PAGE, Memory
from torch_memory_saver_calls import SHIM, run_with_shim

from cumem_sleep import CuMemAllocator, _core, sim
from cumem_sleep.integrations.torch_memory_saver import TorchMemorySaver

PRELOADED = SHIM / "torch_memory_saver_hook_mode_preload.abi3.so"


@pytest.fixture
def saver(allocator: CuMemAllocator) -> Iterator[TorchMemorySaver]:
    yield TorchMemorySaver()
    allocator.regions.set_margin_bytes(0)


def asleep() -> dict[str, set[_core.Segment.Sleep]]:
    found: dict[str, set[_core.Segment.Sleep]] = {}
    for segment in _core.segments():
        found.setdefault(segment.tag, set()).add(segment.sleep)
    return found


class TestSGLang:
    """And verl, which reaches it by `release_memory_occupation` and `resume_memory_occupation`."""

    def test_release_and_resume_memory_occupation(self, saver: TorchMemorySaver, memory: Memory) -> None:
        allocator = CuMemAllocator.get_instance()
        with saver.region("weights", enable_cpu_backup=True):
            weights = allocator.malloc(2 * PAGE)
        with saver.region("kv_cache"):
            allocator.malloc(PAGE)
        content = memory.fill_random(weights, 2 * PAGE)
        for tag in ("kv_cache", "weights", "cuda_graph"):
            saver.pause(tag=tag)
        assert asleep() == {"weights": {BACKED_UP}, "kv_cache": {DROPPED}}
        for tag in ("cuda_graph", "weights"):
            saver.resume(tag=tag)
        assert asleep() == {"weights": {AWAKE}, "kv_cache": {DROPPED}}
        assert memory.read(weights, 2 * PAGE) == content
        saver.resume(tag="kv_cache")
        assert asleep()["kv_cache"] == {AWAKE}

    def test_the_cache_of_a_draft_model_is_paused_with_the_models(self, saver: TorchMemorySaver) -> None:
        allocator = CuMemAllocator.get_instance()
        for _ in range(2):
            with saver.region(tag="kv_cache"):
                allocator.malloc(PAGE)
        saver.pause("kv_cache")
        assert asleep() == {"kv_cache": {DROPPED}}
        saver.resume("kv_cache")

    @pytest.mark.slow
    @pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs the wheel of SGLang")
    def test_its_adapter(self) -> None:
        """SGLang's own module: what it imports of SGLang's, which wants all of its dependencies, is stood in for."""
        process = run_with_shim(
            """
            import importlib.util, pathlib, sys, types
            folder = pathlib.Path(importlib.util.find_spec("sglang").submodule_search_locations[0])
            common = types.ModuleType("sglang.srt.utils.common")
            common.is_xpu = lambda: False
            for name in ("sglang", "sglang.srt", "sglang.srt.utils"):
                sys.modules[name] = types.ModuleType(name)
            sys.modules[common.__name__] = common
            path = folder / "srt" / "utils" / "torch_memory_saver_adapter.py"
            spec = importlib.util.spec_from_file_location("sglang.srt.utils.torch_memory_saver_adapter", path)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            assert module.import_error is None

            import os
            from cumem_sleep import CuMemAllocator
            adapter = module.TorchMemorySaverAdapter.create(enable=True)
            assert adapter.enabled
            adapter.check_validity("test")
            with adapter.configure_subprocess():
                assert "torch_memory_saver_hook_mode_preload" in os.environ["LD_PRELOAD"]
            allocator = CuMemAllocator.get_instance()
            with adapter.region("weights", enable_cpu_backup=True):
                allocator.malloc(1)
                with adapter.disable():
                    ordinary = allocator.malloc(1)
            with adapter.region(tag="kv_cache"):
                allocator.malloc(1)
            for tag in ("kv_cache", "weights", "cuda_graph"):
                adapter.pause(tag)
            usage = allocator.regions.usage()
            assert {tag: each.mapped_bytes for tag, each in usage.items()} == {"weights": 0, "kv_cache": 0}
            for tag in ("cuda_graph", "weights", "kv_cache"):
                adapter.resume(tag)
            assert all(each.mapped_bytes for each in allocator.regions.usage().values())
            try:
                graph = adapter.cuda_graph(
                    cuda_graph=None, pool=None, stream=None, tag="cuda_graph", enable_cpu_backup=True
                )
                with graph:
                    pass
            except Exception as error:
                print(type(error).__name__)
            """
        )
        assert process.returncode == 0, process.stderr
        # Without a GPU no graph is captured; without PyTorch there is none at all.
        assert process.stdout.strip() in ("InvalidState", "ModuleNotFoundError")


class TestSlime:
    def test_the_library_is_found_beside_the_package(self) -> None:
        process = run_with_shim(
            """
            import os, torch_memory_saver
            print(os.path.dirname(os.path.dirname(torch_memory_saver.__file__)))
            """
        )
        assert process.returncode == 0, process.stderr
        assert pathlib.Path(process.stdout.strip(), PRELOADED.name).is_file()

    def test_buffers_of_deep_ep_are_left_out(self, saver: TorchMemorySaver) -> None:
        assert saver._impl is None  # it then does nothing
        allocator = CuMemAllocator.get_instance()
        with saver.region("default", enable_cpu_backup=True):
            assert saver._impl is not None
            cdll = saver._impl._binary_wrapper.cdll
            before = cdll.tms_get_interesting_region()
            cdll.tms_set_interesting_region(False)
            allocator.malloc(PAGE)
            cdll.tms_set_interesting_region(before)
            allocator.malloc(PAGE)
            assert cdll.tms_get_enable_cpu_backup()
            assert (cdll.tms_get_current_tag(), cdll.tms_get_cpu_backup_backend()) == (b"default", b"pinned")
        saver.pause()
        assert asleep() == {"default": {AWAKE, BACKED_UP}}
        saver.resume()


class TestMiles:
    def test_gradients_are_dropped_and_parameters_stay_for_the_update(self, saver: TorchMemorySaver) -> None:
        allocator = CuMemAllocator.get_instance()
        saver.memory_margin_bytes = PAGE
        for tag, backup in (("default", True), ("grad_buffer", False), ("param_buffer", False)):
            with saver.region(tag=tag, enable_cpu_backup=backup):
                allocator.malloc(PAGE)
        saver.pause(tag="grad_buffer")
        saver.pause(tag="default")
        assert asleep() == {"default": {BACKED_UP}, "grad_buffer": {DROPPED}, "param_buffer": {AWAKE}}
        saver.pause(tag="param_buffer")
        saver.resume(tag=None)
        assert asleep() == {"default": {AWAKE}, "grad_buffer": {AWAKE}, "param_buffer": {AWAKE}}

    def test_switching_the_region_on_where_there_is_none_changes_nothing(self, saver: TorchMemorySaver) -> None:
        """It does so after DeepEP's buffers, whatever was before."""
        saver.pause()
        assert saver._impl is not None
        cdll = saver._impl._binary_wrapper.cdll
        cdll.tms_set_interesting_region(False)
        cdll.tms_set_interesting_region(True)
        assert not cdll.tms_get_interesting_region()

    def test_what_was_left_inside_of_a_region_is_left_until_its_end(self, saver: TorchMemorySaver) -> None:
        saver.pause()
        assert saver._impl is not None
        cdll = saver._impl._binary_wrapper.cdll
        with saver.region("outer", enable_cpu_backup=True):
            with saver.region("kv"):
                cdll.tms_set_interesting_region(False)
                with saver.region("inner"):
                    cdll.tms_set_interesting_region(False)
                    assert not cdll.tms_get_interesting_region()
                assert not cdll.tms_get_interesting_region(), "as before the inner one"
            assert (cdll.tms_get_current_tag(), cdll.tms_get_enable_cpu_backup()) == (b"outer", True)
        cdll.tms_set_interesting_region(True)
        assert not cdll.tms_get_interesting_region(), "there is none to return to"

    def test_disk_backups_are_not_in_the_library(self) -> None:
        """It looks for the name of the variable there, and then says what is missing."""
        assert b"TMS_INIT_ENABLE_DISK_BACKUP" not in PRELOADED.read_bytes()


@pytest.mark.slow
@pytest.mark.sim
class TestTheHook:
    """A process that is started as slime and miles start theirs: with LD_PRELOAD and TMS_INIT_ENABLE."""

    CODE = """
        import ctypes, threading
        from torch_memory_saver import torch_memory_saver as saver
        from cumem_sleep import CuMemAllocator, _core
        allocator = CuMemAllocator.get_instance()
        assert not _core.driver_is_open()  # importing touches no GPU
        runtime = ctypes.CDLL(None)  # where libraries find cudaMalloc

        def allocate(nbytes=1 << 20):
            address = ctypes.c_void_p()
            status = runtime.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(nbytes))
            return address.value if status == 0 else -status
        """

    def run(self, code: str, library: pathlib.Path | None = None, **environment: str) -> str:
        return self.run_code(self.CODE + code, library, **environment)

    def run_code(self, code: str, library: pathlib.Path | None = None, **environment: str) -> str:
        preloaded = ":".join(str(path) for path in (PRELOADED, library) if path)
        process = run_with_shim(code, LD_PRELOAD=preloaded, **environment)
        assert process.returncode == 0, process.stderr
        assert process.stderr == ""
        return process.stdout

    def test_the_whole_process_is_a_region(self) -> None:
        self.run(
            """
        first = allocate()
        found = []
        thread = threading.Thread(target=lambda: found.append(allocate()))
        thread.start()
        thread.join()
        ctypes.memset(first, 7, 100)
        saver.pause()
        assert allocator.regions.usage()["default"].segments == 2
        assert allocator.regions.usage()["default"].mapped_bytes == 0
        assert allocator.regions.usage()["default"].host_bytes == 2 * (2 << 20)
        saver.resume()
        assert ctypes.string_at(first, 100) == bytes([7]) * 100
        assert allocator.get_current_usage() == 0
        for address in (first, *found):
            assert runtime.cudaFree(ctypes.c_void_p(address)) == 0
        assert allocator.regions.usage() == {}
        """,
            TMS_INIT_ENABLE="1",
            TMS_INIT_ENABLE_CPU_BACKUP="1",
        )

    def test_a_region_inside_counts_and_disable_leaves_it(self, runtime: pathlib.Path) -> None:
        self.run(
            """
        with saver.region("grad_buffer"):
            allocate()
        with saver.disable():
            outside = allocate()
            assert runtime.cudaFree(ctypes.c_void_p(outside)) == 0
            assert runtime.frees() == 1
        inside = allocate()
        saver.pause()
        usage = allocator.regions.usage()
        assert {tag: each.host_bytes for tag, each in usage.items()} == {"grad_buffer": 0, "default": 2 << 20}
        assert outside < 1 << 20 < inside
        """,
            runtime,
            TMS_INIT_ENABLE="1",
            TMS_INIT_ENABLE_CPU_BACKUP="1",
        )

    def test_c_code_pauses_and_resumes(self) -> None:
        """By the functions of torch_memory_saver's library, with a tag, or for all."""
        self.run(
            """
        runtime.tms_pause(None)  # nothing was allocated yet
        runtime.tms_resume(None)
        first = allocate()
        with saver.region("a"):
            allocate()
        mapped = lambda: {tag: each.mapped_bytes >> 21 for tag, each in allocator.regions.usage().items()}
        ctypes.memset(first, 7, 100)
        runtime.tms_pause(b"a")
        runtime.tms_pause(bytes([255]))  # not a tag that any region has
        assert mapped() == {"a": 0, "default": 1}
        runtime.tms_pause(None)
        assert mapped() == {"a": 0, "default": 0}
        runtime.tms_resume(b"default")
        assert mapped() == {"a": 0, "default": 1}
        runtime.tms_resume(None)
        assert mapped() == {"a": 1, "default": 1}
        assert ctypes.string_at(first, 100) == bytes([7]) * 100
        """,
            TMS_INIT_ENABLE="1",
            TMS_INIT_ENABLE_CPU_BACKUP="1",
        )

    def test_c_code_that_pauses_before_python_does_anything(self) -> None:
        self.run("runtime.tms_pause(None); runtime.tms_resume(None); assert not _core.driver_is_open()")

    def test_what_fails_is_reported_and_c_code_goes_on(self) -> None:
        preloaded = {"LD_PRELOAD": str(PRELOADED), "TMS_INIT_ENABLE": "1", "TMS_INIT_ENABLE_CPU_BACKUP": "1"}
        code = "allocate(); runtime.tms_pause(None); print(len(_core.segments()))"
        process = run_with_shim(self.CODE + "\n        " + code, CUMEM_SLEEP_HOST_BUDGET_BYTES="1024", **preloaded)
        assert process.returncode == 0, process.stderr
        assert process.stdout == "1\n"
        assert "OutOfHostMemory" in process.stderr

    @pytest.mark.parametrize("paused", [False, True])
    def test_the_backup_of_freed_memory_is_not_pinned_any_more(self, runtime: pathlib.Path, paused: bool) -> None:
        """As torch_memory_saver's `test_cpu_backup` looks at it: by CUDA, and past the interface."""
        self.run(
            f"""
        from cumem_sleep import sim
        driver = ctypes.CDLL(str(sim.library_path()))
        saver.retain_cpu_backup = True
        with saver.region("a", enable_cpu_backup=True):
            address = allocate(4096)
        context = ctypes.c_void_p()  # of this thread, as PyTorch has one
        assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == driver.cuCtxSetCurrent(context) == 0

        def backup_address():
            return allocator.read_backup(address, 4096, copy=False).ctypes.data

        def is_pinned(address):
            of_runtime = saver._impl._binary_wrapper.cdll
            get_flags = of_runtime.cudaHostGetFlags
            get_flags.argtypes = [ctypes.POINTER(ctypes.c_uint), ctypes.c_void_p]
            status = get_flags(ctypes.byref(ctypes.c_uint()), address)
            assert status == of_runtime.cudaGetLastError()
            return status == 0

        saver.pause("a")
        backup = backup_address()
        assert is_pinned(backup)
        if not {paused}:
            saver.resume("a")
            assert backup_address() == backup and is_pinned(backup)
        pool = saver._impl._mem_pools.pop(("a", True, False, "pinned", 0))
        with saver._impl._with_region_config(tag="a", enable_cpu_backup=True, cpu_backup_backend="pinned"):
            assert saver._impl._binary_wrapper.cdll.tms_get_current_tag() == b"a"
            del pool
            assert runtime.cudaFree(ctypes.c_void_p(address)) == 0
        assert not saver._impl._binary_wrapper.cdll.tms_get_interesting_region()
        assert not is_pinned(backup)
        """,
            runtime,
        )

    def test_a_full_device_is_said_so_that_pytorch_tries_again(self) -> None:
        self.run(
            """
        assert allocate(1 << 45) == -2  # cudaErrorMemoryAllocation
        allocate()
        """,
            TMS_INIT_ENABLE="1",
        )

    def test_without_the_variable_only_regions_are_served(self, runtime: pathlib.Path) -> None:
        """Outside of them the runtime's own functions are called, as they are before this layer says anything."""
        self.run(
            """
        assert allocate() < 1 << 20
        saver.pause()
        assert allocate() < 1 << 20
        with saver.region("a"):
            assert allocate() > 1 << 20
        assert allocate() < 1 << 20
        assert allocator.regions.usage()["a"].segments == 1
        """,
            runtime,
        )

    def test_a_region_without_a_pool_may_be_the_first_use(self) -> None:
        self.run(
            """
        with saver._initialized()._with_region_config("graphs", True):
            address = allocate()
        assert allocator.regions.usage()["graphs"].segments == 1
        saver.pause("graphs")
        assert allocator.regions.usage()["graphs"].mapped_bytes == 0
        saver.resume("graphs")
        assert runtime.cudaFree(ctypes.c_void_p(address)) == 0
        """
        )

    def test_a_graph_may_be_the_first_use(self) -> None:
        """PyTorch is in none of these environments; of its `cuda.graph`, when the driver is opened matters."""
        self.run(
            """
        import contextlib, sys, types
        is_open = []

        @contextlib.contextmanager
        def graph(*_, **__):
            is_open.append(_core.driver_is_open())
            yield

        sys.modules["torch"] = types.SimpleNamespace(cuda=types.SimpleNamespace(graph=graph))
        with saver.cuda_graph(object(), tag="graphs"):
            address = allocate()
        assert is_open == [True]
        assert allocator.regions.usage()["graphs"].segments == 1
        del sys.modules["torch"]
        assert runtime.cudaFree(ctypes.c_void_p(address)) == 0
        """
        )

    def test_what_stands_in_the_way_does_not_stop_an_import(self) -> None:
        self.run_code(
            """
        from torch_memory_saver import torch_memory_saver as saver
        try:
            saver.pause()
        except ValueError as error:
            assert "CUMEM_SLEEP_VERIFY" in str(error)
        else:
            raise AssertionError("it has been used")
        """,
            TMS_INIT_ENABLE="1",
            CUMEM_SLEEP_VERIFY="bad",
        )

    def test_a_program_that_uses_no_cuda_runs_with_it(self) -> None:
        environment = {**os.environ, "LD_PRELOAD": str(PRELOADED)}
        process = subprocess.run(["true"], env=environment, capture_output=True, text=True, check=True)
        assert process.stderr == ""

    @pytest.fixture
    def runtime(self, tmp_path: pathlib.Path) -> pathlib.Path:
        """In the place of libcudart: small numbers for addresses."""
        source, library = tmp_path / "runtime.c", tmp_path / "libruntime.so"
        source.write_text(
            """
            #include <dlfcn.h>
            #include <stddef.h>
            typedef int (*Register)(void*, size_t, unsigned);
            typedef int (*Unregister)(void*);
            static int frees_;
            int frees(void) { return frees_; }
            int cudaMalloc(void** address, size_t bytes) { *address = (void*)4096; return bytes == 0; }
            int cudaFree(void* address) { frees_++; return address != (void*)4096; }
            int cudaGetDevice(int* device) { *device = 0; return 0; }
            static int last_error_;
            int cudaGetLastError(void) { return last_error_; }
            /* The simulated driver registers no page twice. 712: CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED */
            int cudaHostGetFlags(unsigned* flags, void* address) {
                void* driver = dlopen(DRIVER, RTLD_NOW | RTLD_NOLOAD);
                int status = ((Register)dlsym(driver, "cuMemHostRegister_v2"))(address, 1, 0);
                if (status == 0) ((Unregister)dlsym(driver, "cuMemHostUnregister"))(address);
                return last_error_ = status == 712 ? 0 : 1;
            }
            """
        )
        driver = f'-DDRIVER="{sim.library_path()}"'
        subprocess.run(["cc", "-shared", "-fPIC", driver, "-o", str(library), str(source), "-ldl"], check=True)
        return library
