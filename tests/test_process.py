"""Processes: what an import does, forks, exits, drivers that are missing or too old, bad settings. Each in its own."""

from __future__ import annotations

import os
import pathlib
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from support import assert_clean_exit, run_script

import cumem_sleep
from cumem_sleep import sim

pytestmark = pytest.mark.sim

ALLOCATED = """
    allocator = fresh_allocator()
    memory = Memory()
    address = allocator.malloc(2 * PAGE, "weights")
    content = memory.fill_random(address, 2 * PAGE)
    memory.close()
    """


USER_OF_HOOKS = """
#include <pthread.h>
#include <stddef.h>
#include <unistd.h>

typedef void* (*Malloc)(size_t, int, void*);
typedef void (*Free)(void*, size_t, int, void*);

static Malloc hook_malloc;
static Free hook_free;
static void* kept[8];

static void use(int device) {
    void* address = hook_malloc(1, device, NULL);
    if (address) hook_free(address, 1, device, NULL);
}

static void* use_for_ever(void* argument) {
    for (;;) use(0);
    return argument;
}

void arm(Malloc with_malloc, Free with_free, int threads) {
    hook_malloc = with_malloc;
    hook_free = with_free;
    for (int i = 0; i < 8; ++i) kept[i] = hook_malloc(1, i % 2, NULL);
    pthread_t thread;
    while (threads-- > 0) pthread_create(&thread, NULL, use_for_ever, NULL);
}

__attribute__((destructor)) static void at_the_end(void) {
    for (int i = 0; i < 8; ++i) hook_free(kept[i], 1, i % 2, NULL);
    for (int i = 0; i < 50; ++i) use(i % 2);
    if (write(1, "used to the end\\n", 16) < 0) _exit(1);
}
"""

SHOW = """
import cumem_sleep, os
from cumem_sleep import CuMemAllocator, _core
assert os.path.dirname(_core.__file__) == os.path.dirname(cumem_sleep.__file__)
print(os.path.dirname(cumem_sleep.__file__))
"""


class TestImport:
    def test_beside_sources_without_an_extension(self, tmp_path: pathlib.Path) -> None:
        source = pathlib.Path(sim.__file__).parent
        (tmp_path / "cumem_sleep").mkdir()
        for path in source.glob("*.py"):
            shutil.copy(path, tmp_path / "cumem_sleep")
        nothing_installed = [sys.executable, "-S", "-c", "import cumem_sleep"]
        process = subprocess.run(
            nothing_installed, cwd=tmp_path, env={"PYTHONPATH": ""}, capture_output=True, text=True, check=False
        )
        assert process.returncode == 1
        last = process.stderr.splitlines()[-1]
        assert last.startswith(f"ImportError: {tmp_path}/cumem_sleep has the sources of cumem-sleep, but no extension")
        assert last.endswith("or `pip install -e .` to work on the sources")

    @pytest.mark.slow
    @pytest.mark.parametrize("start", [["-c", SHOW], ["-m", "show"], ["-m", "cumem_sleep", "--version"]])
    def test_in_a_checkout_the_installed_package_serves(self, start: list[str], tmp_path: pathlib.Path) -> None:
        """Python puts the folder that it is started in first: the sources there would hide what is installed."""
        source = pathlib.Path(sim.__file__).parent
        checkout, installed = tmp_path / "checkout", tmp_path / "installed"
        (checkout / "cumem_sleep").mkdir(parents=True)
        shutil.copy(source / "__init__.py", checkout / "cumem_sleep")
        (checkout / "show.py").write_text(SHOW)
        installed.mkdir()
        (installed / "cumem_sleep").symlink_to(source)
        process = subprocess.run(
            [sys.executable, *start],
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": str(installed)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (process.returncode, process.stderr) == (0, "")
        expected = f"cumem-sleep {cumem_sleep.__version__}" if "--version" in start else f"{installed}/cumem_sleep"
        assert process.stdout.strip().partition(" (")[0] == expected

    def test_every_public_name_is_there(self) -> None:
        process = run_script(
            """
            import cumem_sleep
            assert set(cumem_sleep.__all__) <= set(dir(cumem_sleep))
            for name in cumem_sleep.__all__:
                assert getattr(cumem_sleep, name).__name__ == name
            cumem_sleep.sim.stats  # a module that nobody imported
            try:
                cumem_sleep.nonsense
            except AttributeError as error:
                assert str(error) == "module 'cumem_sleep' has no attribute 'nonsense'"
            else:
                raise AssertionError("no error")
            from cumem_sleep import *
            CuMemAllocator, Settings
            """,
            preamble="",
        )
        assert process.returncode == 0, process.stderr

    @pytest.mark.parametrize("imported_before", [False, True])
    def test_in_a_subinterpreter_is_refused(self, imported_before: bool) -> None:
        """Up to Python 3.11 it would wait there for a lock that its own thread holds."""
        process = run_script(
            """
            import sys
            try:
                import _xxsubinterpreters as interpreters
            except ImportError:
                import _interpreters as interpreters
            run = getattr(interpreters, "run_string", None) or interpreters.exec
            """,
            "import cumem_sleep" if imported_before else "",
            """
            for name in ("cumem_sleep", "cumem_sleep._core", "cumem_sleep.vllm.plugin"):
                code = f"import sys; sys.path[:] = {sys.path!r}; import {name}"
                try:
                    failure = run(interpreters.create(), code)
                    print(failure)
                except interpreters.RunFailedError as error:
                    print(error)
            """,
            preamble="",
        )
        assert process.returncode == 0, process.stderr
        assert process.stdout.count("cumem-sleep does not work in a subinterpreter") == 3, process.stdout

    def test_opens_no_driver_and_starts_no_thread(self) -> None:
        process = run_script(
            """
            import os
            import numpy  # has threads of its own

            def threads():
                return sorted(os.listdir("/proc/self/task"))

            threads_before = threads()
            import cumem_sleep
            from cumem_sleep import CuMemAllocator, Settings, sim

            def driver_is_mapped():
                with open("/proc/self/maps") as maps:
                    return any("libcuda" in line or "/dev/nvidia" in line for line in maps)

            assert not driver_is_mapped()
            assert threads() == threads_before
            for heavy in ("torch", "triton", "cupy", "vllm"):
                assert heavy not in __import__("sys").modules, heavy

            allocator = CuMemAllocator.get_instance()
            assert allocator.usage() == {}
            assert allocator.get_current_usage() == 0
            allocator.release_pools()
            allocator.close()
            assert not driver_is_mapped(), "looking needs no driver"
            assert threads() == threads_before

            allocator.free(allocator.malloc(1))
            assert driver_is_mapped()
            """,
            preamble="",
        )
        assert_clean_exit(process)

    def test_reads_no_settings(self) -> None:
        """A bad setting shows when the allocator is made, not at the import."""
        assert_clean_exit(run_script("import cumem_sleep", preamble="", CUMEM_SLEEP_DRIVER="vulkan"))


class TestFork:
    WAIT = """
        import os, sys, traceback

        def in_child(work):
            sys.stdout.flush()
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    work()
                    status = 0
                except BaseException:
                    traceback.print_exc()
                if EXIT_AS_PYTHON_DOES:
                    sys.exit(status)
                os._exit(status)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert status == 0, f"the child ended with {status}"
        """

    def test_before_first_use_works(self) -> None:
        process = run_script(
            "EXIT_AS_PYTHON_DOES = True",
            self.WAIT,
            """
            allocator = CuMemAllocator.get_instance()

            def use():
                memory = Memory()
                address = allocator.malloc(PAGE, "weights")
                content = memory.fill_random(address, PAGE)
                allocator.sleep()
                allocator.wake_up()
                assert memory.read(address, PAGE) == content
                memory.close()
                free_everything()

            reset_simulation()
            CuMemAllocator.instance = allocator
            in_child(use)
            use()
            """,
        )
        assert_clean_exit(process)

    @pytest.mark.slow
    @pytest.mark.parametrize("asleep", [False, True])
    @pytest.mark.parametrize("exit_as_python_does", [False, True])
    def test_after_first_use_is_refused_in_the_child(self, asleep: bool, exit_as_python_does: bool) -> None:
        process = run_script(
            f"EXIT_AS_PYTHON_DOES, ASLEEP = {exit_as_python_does}, {asleep}",
            self.WAIT,
            ALLOCATED,
            """
            from cumem_sleep.core.pinned import pinned_table

            other = allocator.malloc(PAGE, "default")
            if ASLEEP:
                allocator.sleep()
            with _core.CopyStream(0):
                pinned_table(PAGE // 1024, 0).close()  # both are kept for the next operation
            before = {tag: usage for tag, usage in allocator.usage().items()}
            stats = sim.stats()

            def use():
                library = hooks()
                calls = {
                    "malloc": lambda: allocator.malloc(PAGE),
                    "free": lambda: allocator.free(other),
                    "sleep": allocator.sleep,
                    "sleep at level 2": lambda: allocator.sleep(2),
                    "wake_up": allocator.wake_up,
                    "discard": lambda: allocator.discard("weights"),
                    "usage": allocator.usage,
                    "release_backups": allocator.release_backups,
                    "use_memory_pool": lambda: allocator.use_memory_pool("weights").__enter__(),
                    "stream": lambda: _core.CopyStream(0),
                    "table": lambda: pinned_table(PAGE // 1024, 0),
                }
                for name, call in calls.items():
                    with raises(InvalidState, "fork"):
                        call()
                        print(name)
                library.cumem_sleep_free(other, PAGE, 0, None)
                allocator.release_pools()
                allocator.close()

            in_child(use)
            assert sim.stats().calls == stats.calls, "the child shares the parent's counts only if it made calls"
            assert allocator.usage() == before
            allocator.wake_up()
            assert memory.read(address, 2 * PAGE) == content
            memory.close()
            allocator.free(other)
            allocator.sleep()
            allocator.wake_up()
            assert memory.read(address, 2 * PAGE) == content
            memory.close()
            free_everything()
            """,
        )
        assert_clean_exit(process)

    def test_hook_in_the_child_returns_null(self) -> None:
        process = run_script(
            "EXIT_AS_PYTHON_DOES = True",
            self.WAIT,
            ALLOCATED,
            """
            def use():
                assert hooks().cumem_sleep_malloc(PAGE, 0, None) is None

            in_child(use)
            """,
        )
        assert process.returncode == 0, process.stderr
        assert "fork" in process.stderr
        assert process.stderr.count("\n") == 1

    def test_while_another_thread_sleeps(self) -> None:
        """The lock of a thread that the child does not have must not hang it."""
        process = run_script(
            "EXIT_AS_PYTHON_DOES = True",
            self.WAIT,
            ALLOCATED,
            """
            import threading, time

            def use():
                for call in (allocator.usage, allocator.sleep, lambda: allocator.free(address)):
                    with raises(InvalidState, "fork"):
                        call()

            sleeper = threading.Thread(target=allocator.sleep)
            sleeper.start()
            while sim.stats().calls["cuMemcpyDtoHAsync"] == 0:
                time.sleep(0.0005)
            in_child(use)
            sleeper.join()
            allocator.wake_up()
            assert memory.read(address, 2 * PAGE) == content
            memory.close()
            free_everything()
            """,
            CUMEM_SLEEP_SIM_COPY_DELAY_US="50000",
        )
        assert_clean_exit(process)


class TestExit:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        "rest",
        [
            "",
            "allocator.sleep()",
            "keep = memory.read(address, 2 * PAGE)",  # its stream and its block live to the end
            "allocator.sleep(); allocator.wake_up(); CuMemAllocator.instance = None; del allocator, memory",
        ],
    )
    def test_with_memory(self, rest: str) -> None:
        assert_clean_exit(run_script(ALLOCATED, rest))

    def test_free_while_the_process_exits(self) -> None:
        """As PyTorch does, whose tensors live longer than the interpreter's modules."""
        process = run_script(
            ALLOCATED,
            """
            import atexit

            class Tensor:
                def __init__(self, address, library):
                    self.address, self.library = address, library
                def __del__(self):
                    self.library.cumem_sleep_free(self.address, PAGE, 0, None)

            allocator.sleep()
            kept = Tensor(allocator.malloc(PAGE), hooks())
            kept.cycle = kept
            atexit.register(lambda: allocator.free(address))
            """,
        )
        assert_clean_exit(process)

    @pytest.mark.slow
    @pytest.mark.parametrize("threads", [0, 4])
    def test_hooks_of_libraries_that_outlive_python(self, tmp_path: pathlib.Path, threads: int) -> None:
        """Threads and destructors of C libraries allocate and free until the very end: nothing that they use is gone.

        What was destroyed too early is overwritten (MALLOC_PERTURB_), or found by AddressSanitizer where it is there.
        """
        if shutil.which("cc") is None:
            pytest.skip("no C compiler")
        source, library = tmp_path / "user.c", tmp_path / "user.so"
        source.write_text(USER_OF_HOOKS)
        subprocess.run(["cc", "-shared", "-fPIC", "-pthread", "-o", str(library), str(source)], check=True)
        process = run_script(
            ALLOCATED,
            f"""
            import ctypes
            sim.configure(devices=2)
            user = ctypes.CDLL({str(library)!r})
            with _core.PoolScope("a tag of more characters than a string holds by itself"):
                user.arm(hooks().cumem_sleep_malloc, hooks().cumem_sleep_free, {threads})
            """,
            MALLOC_PERTURB_="165",
        )
        assert process.returncode == 0, process.stderr
        assert process.stdout == "used to the end\n"
        assert process.stderr == ""

    @pytest.mark.slow
    @pytest.mark.parametrize("call", ["usage", "wake_up", "release_backups", "prepare"])
    def test_a_finaliser_after_a_daemon_was_ended_in_the_middle(self, call: str) -> None:
        """What Python has ended gives nothing back any more: nobody waits for it."""
        process = run_script(
            ALLOCATED,
            f"""
            import os, sys, threading, types

            class Late:
                def __init__(self):
                    self.call, self.write, self.error = allocator.{call}, os.write, InvalidState

                def __del__(self):
                    try:
                        self.call()
                    except self.error as error:
                        self.write(1, str(error).encode())

            sys.modules["kept to the end"] = module = types.ModuleType("kept to the end")
            module.late = Late()
            del module
            held = threading.Event()

            def work():
                with allocator._lock.hold():
                    held.set()
                    threading.Event().wait()

            threading.Thread(target=lambda: allocator._lock.run(work), daemon=True).start()
            held.wait()
            """,
        )
        assert_clean_exit(process)
        assert "while Python exits" in process.stdout

    def test_finalisers_that_prepare_while_python_exits(self) -> None:
        """No thread gets the interpreter any more, so none is begun, and nobody waits for one."""
        process = run_script(
            ALLOCATED,
            """
            import os, sys, types

            class Late:
                def __init__(self):
                    self.allocator, self.write, self.error = allocator, os.write, InvalidState

                def __del__(self):
                    try:
                        self.allocator.prepare()
                    except self.error as error:
                        self.write(1, str(error).encode())
                    self.allocator.release_backups()
                    self.write(1, b" released")

            sys.modules["kept to the end"] = module = types.ModuleType("kept to the end")
            module.late = Late()
            del module
            """,
        )
        assert_clean_exit(process)
        assert "Python exits" in process.stdout
        assert process.stdout.endswith(" released")

    @pytest.mark.skipif(
        sys.version_info[:2] != (3, 12), reason="there a look for signals runs what another thread scheduled"
    )
    def test_a_daemon_is_ended_in_a_finaliser_that_a_look_for_signals_runs(self) -> None:
        """It waits for the lock, and the collection that the main thread has scheduled runs there."""
        process = run_script(
            ALLOCATED,
            """
            import gc, os, select, sys, threading, time, types

            class Late:
                def __init__(self):
                    self.sleep = time.sleep

                def __del__(self):
                    self.sleep(1)  # until the daemon wants the interpreter again

            class Garbage:
                def __init__(self, write):
                    self.cycle, self.end = self, write

                def __del__(self):
                    print(threading.current_thread().daemon, flush=True)
                    os.write(self.end, b"main may end")
                    time.sleep(0.3)

            sys.modules["kept to the end"] = module = types.ModuleType("kept to the end")
            module.late = Late()
            del module
            held = threading.Event()

            def work():
                with allocator._lock.hold():
                    held.set()
                    threading.Event().wait()

            threading.Thread(target=lambda: allocator._lock.run(work), daemon=True).start()
            held.wait()
            threading.Thread(target=allocator.usage, daemon=True).start()
            time.sleep(0.2)
            read, write = os.pipe()
            gc.disable()
            gc.set_threshold(1)
            Garbage(write)
            young = [set() for _ in range(10)]
            gc.enable()
            select.select({read}, (), (), 20)  # that set schedules it; then this thread waits without the interpreter
            """,
        )
        assert_clean_exit(process)
        assert process.stdout == "True\n"

    @pytest.mark.slow
    @pytest.mark.parametrize("daemon", [False, True])
    @pytest.mark.parametrize("operation", ["sleep", "wake_up", "malloc"])
    def test_while_a_thread_works(self, operation: str, daemon: bool) -> None:
        """Several at once: where cores are scarce, the thread is more often in the middle of something."""
        parts = (
            ALLOCATED,
            f"""
            import threading, time

            def work():
                for _ in range(10000 if {daemon} else 8):
                    if {operation!r} == "malloc":
                        allocator.free(allocator.malloc(PAGE))
                    else:
                        allocator.sleep()
                        allocator.wake_up()

            if {operation!r} == "wake_up":
                allocator.sleep()
            threading.Thread(target=work, daemon={daemon}).start()
            time.sleep(0.03)
            """,
        )
        count = 8 if daemon else 1
        with ThreadPoolExecutor(count) as pool:
            runs = [pool.submit(run_script, *parts, CUMEM_SLEEP_SIM_COPY_DELAY_US="5000") for _ in range(count)]
        for run in runs:
            assert_clean_exit(run.result())

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_after_a_signal(self, number: signal.Signals) -> None:
        """In the middle of a sleep: Ctrl-C ends the program when all is asleep, SIGTERM at once."""
        process = run_script(
            ALLOCATED,
            f"""
            import os

            to_host = _core.CopyStream.to_host

            def interrupt(*arguments):
                _core.CopyStream.to_host = to_host
                os.kill(os.getpid(), {number})
                to_host(*arguments)

            _core.CopyStream.to_host = interrupt
            try:
                allocator.sleep()
            except KeyboardInterrupt:
                print(*[segment.sleep.name for segment in _core.segments()])
                raise
            """,
            CUMEM_SLEEP_SIM_COPY_DELAY_US="50000",
        )
        assert process.returncode == -number
        if number == signal.SIGINT:
            assert process.stdout == "BACKED_UP\n"
            assert process.stderr.rstrip().endswith("KeyboardInterrupt")
        assert "terminate" not in process.stderr


class TestDriver:
    USE = """
        try:
            CuMemAllocator.get_instance().malloc(1)
        except CumemSleepError as error:
            print(type(error).__name__, error)
        """

    def test_missing(self) -> None:
        found = run_script("import ctypes; ctypes.CDLL('libcuda.so.1')", preamble="")
        if found.returncode == 0:
            pytest.skip("this machine has libcuda")
        process = run_script(self.USE, CUMEM_SLEEP_DRIVER="cuda")
        assert_clean_exit(process)
        assert process.stdout.startswith("DriverError dlopen failed with CUDA_ERROR_NO_DRIVER")
        assert "install the NVIDIA driver" in process.stdout
        assert "CUMEM_SLEEP_DRIVER=sim" in process.stdout

    def test_too_old(self) -> None:
        process = run_script(self.USE, CUMEM_SLEEP_SIM_DRIVER_VERSION="11040")
        assert_clean_exit(process)
        assert process.stdout.startswith("DriverError")
        for words in ("11.4", "12.0", "update the NVIDIA driver"):
            assert words in process.stdout

    def test_that_does_not_start(self) -> None:
        """After a failed start the next use may succeed."""
        process = run_script(
            """
            allocator = CuMemAllocator.get_instance()
            sim.fail("cuInit", error="CUDA_ERROR_NO_DEVICE")
            with raises(DriverError, "cuInit", "CUDA_ERROR_NO_DEVICE"):
                allocator.malloc(PAGE)
            assert allocator.usage() == {}
            allocator.malloc(PAGE)
            free_everything()
            """
        )
        assert_clean_exit(process)

    def test_is_told_apart_from_another_program(self, tmp_path: pathlib.Path) -> None:
        """A library without the calls is no driver, and the error says which call it lacks."""
        shutil.copy(next(pathlib.Path("/lib").glob("*/libm.so.6")), tmp_path / "libcuda.so.1")
        process = run_script(self.USE, CUMEM_SLEEP_DRIVER="cuda", LD_LIBRARY_PATH=str(tmp_path))
        assert_clean_exit(process)
        assert "libcuda.so.1 has no cuDriverGetVersion" in process.stdout

    def test_simulated_one_in_the_place_of_libcuda(self, tmp_path: pathlib.Path) -> None:
        shutil.copy(sim.library_path(), tmp_path / "libcuda.so.1")
        process = run_script(
            """
            allocator = CuMemAllocator.get_instance()
            assert allocator.settings.driver == "cuda"
            memory = Memory()
            address = allocator.malloc(PAGE, "weights")
            content = memory.fill_random(address, PAGE)
            memory.close()
            for report in (allocator.sleep(), allocator.wake_up()):
                assert report.simulated
                assert str(report).startswith("[simulated] "), report
            assert memory.read(address, PAGE) == content
            memory.close()
            assert sim.stats().live_handles == 1
            allocator.free(address)
            assert sim.stats().live_handles == 0
            """,
            CUMEM_SLEEP_DRIVER="cuda",
            LD_LIBRARY_PATH=str(tmp_path),
        )
        assert_clean_exit(process)

    def test_is_the_processs_own(self) -> None:
        """The second allocator of a process cannot run on another driver."""
        process = run_script(
            """
            allocator = CuMemAllocator(Settings(driver="sim"))
            allocator.free(allocator.malloc(PAGE))
            with raises(InvalidState, "libcuda_sim.so"):
                CuMemAllocator(Settings(driver="cuda")).malloc(PAGE)
            """
        )
        assert_clean_exit(process)


class TestSettings:
    def test_bad_value_names_the_variable(self) -> None:
        process = run_script(TestDriver.USE, CUMEM_SLEEP_HOST_BUDGET_BYTES="much")
        assert_clean_exit(process)
        for words in ("InvalidArgument", "CUMEM_SLEEP_HOST_BUDGET_BYTES='much'", "30GiB"):
            assert words in process.stdout

    def test_good_values_are_used(self) -> None:
        process = run_script(
            """
            assert CuMemAllocator.get_instance().settings == Settings(
                driver="sim", host_budget_bytes=30 << 30, retain_backups=False, verify="off", poison=True,
                prefault_threads=3,
            )
            """,
            CUMEM_SLEEP_HOST_BUDGET_BYTES="30GiB",
            CUMEM_SLEEP_RETAIN_BACKUPS="no",
            CUMEM_SLEEP_VERIFY="off",
            CUMEM_SLEEP_POISON="1",
            CUMEM_SLEEP_PREFAULT_THREADS="3",
        )
        assert_clean_exit(process)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("operation", "access"),
    [
        ("allocator.sleep()", "ctypes.string_at(address, 1)"),
        ("allocator.sleep()", "ctypes.memset(address, 0, 1)"),
        ("allocator.discard('weights')", "ctypes.string_at(address, 1)"),
        ("allocator.free(address)", "ctypes.memset(address, 0, 1)"),
    ],
)
def test_touching_memory_that_is_not_there_faults(operation: str, access: str) -> None:
    process = run_script(ALLOCATED, f"import ctypes\n{access}\n{operation}\nprint('so far', flush=True)\n{access}\n")
    assert process.returncode == -signal.SIGSEGV, process.stderr
    assert process.stdout == "so far\n"
