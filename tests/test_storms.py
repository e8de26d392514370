"""Storms of signals and of finalisers. `CUMEM_SLEEP_TEST_STORM_S` says how long each lasts."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from support import HANGS_S, assert_clean_exit, run_script

pytestmark = pytest.mark.sim

STORM_S = float(os.environ.get("CUMEM_SLEEP_TEST_STORM_S", "4"))
STORM = """
    import gc, logging, os, random, signal, threading, time

    seed = int(os.environ["SEED"])
    choice = random.Random(seed)
    tuning = CuMemAllocator.tuning
    tuning.prepare_piece_bytes, tuning.slab_bytes = MIB, PAGE
    logging.getLogger("cumem_sleep").setLevel(logging.ERROR)  # of preparations that a handler ends
    reset_simulation()
    import cumem_sleep.digest.digester
    cumem_sleep.digest.digester.sums_of = quick_sums
    allocator = fresh_allocator(compress=COMPRESS)
    memory = Memory()
    contents = {}
    content = bf16_weights(PAGE, np.random.default_rng(0))
    for tag in ("weights", "default", "weights"):
        address = allocator.malloc(PAGE, tag)
        memory.write(address, content)
        contents[address] = content
    memory.close()
    from cumem_sleep.integrations.torch_memory_saver import TorchMemorySaver
    TorchMemorySaver()._initialized()
    armed, hits = False, 0
    preparations = []

    def call_something():
        what = choice.randrange(6)
        if what == 0:
            allocator.usage()
        elif what == 1:
            assert CuMemAllocator.get_instance() is allocator
        elif what == 2:
            allocator.release_backups()
        elif what == 3:
            preparations.append(allocator.prepare())
        elif what == 4 and preparations:
            preparations[-1].stop()
        else:
            allocator.free(allocator.malloc(PAGE, "extra"))

    def handle(number, frame):
        global hits
        if not armed:
            return
        hits += 1
        if number == signal.SIGALRM:
            try:
                call_something()
            except (KeyboardInterrupt, SystemExit, TimeoutError, InvalidState):
                pass
        else:
            raise {signal.SIGINT: KeyboardInterrupt, signal.SIGUSR1: SystemExit, signal.SIGUSR2: TimeoutError}[number]

    kinds = [signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM]
    for kind in kinds:
        signal.signal(kind, handle)
    done = threading.Event()

    def storm():
        mine = random.Random(seed + 1)
        while not done.is_set():
            for _ in range(mine.choice([1, 1, 5, 30])):
                os.kill(os.getpid(), mine.choice(kinds))
                time.sleep(mine.choice([0, 0, 1e-4, 1e-3]))
            time.sleep(mine.random() * 0.01)

    def attempt(operation):
        "Whether it returned."
        global armed
        try:
            armed = True
            operation()
            armed = False
            return True
        except (KeyboardInterrupt, SystemExit, TimeoutError):
            armed = False
            return False
        finally:
            armed = False

    def states():
        return {s.address: s.sleep for s in _core.segments() if s.address in contents}

    def check():
        for segment in _core.segments():
            if segment.address in contents and segment.sleep == AWAKE:
                assert segment.has_memory
                assert ctypes.string_at(segment.address, PAGE) == contents[segment.address]

    def all_or_nothing(before, wanted):
        after = states()
        assert after == before or set(after.values()) <= wanted, (before, after)

    def sleep():
        before = states()
        attempt(allocator.sleep)
        all_or_nothing(before, {BACKED_UP})

    def wake():
        before = states()
        attempt(allocator.wake_up)
        all_or_nothing(before, {AWAKE})

    def free_through_hook():
        address = allocator.malloc(PAGE, "extra")
        attempt(allocator.prepare)
        attempt(lambda: hooks().cumem_sleep_free(address, PAGE, 0, None))

    def scopes():
        "Pools, regions and what is like them, in each other: whatever a handler raises, nothing is left of them."
        saver = TorchMemorySaver()
        ways = [
            lambda: allocator.use_memory_pool("kv_cache"), lambda: allocator.regions.use("x"),
            lambda: allocator.regions.use_without_pool("x", backup=True), allocator.using_cuda,
            lambda: saver.region("x", enable_cpu_backup=True, cpu_backup_backend="mmap"), allocator.regions.outside,
        ]
        chosen = [choice.choice(ways) for _ in range(3)]

        def nest():
            with chosen[0](), chosen[1](), chosen[2]():
                allocator.usage()

        def overlap():
            entered = [way() for way in chosen]
            for scope in entered:
                scope.__enter__()
            choice.shuffle(entered)
            for scope in entered:
                scope.__exit__(None, None, None)

        attempt(choice.choice([nest, overlap]))
        assert (_core.thread_tag(), _core.thread_backup()) == ("default", _core.BackupPlan.BY_LEVEL), chosen
        assert not saver._initialized().tms_get_interesting_region()

    operations = [
        sleep, sleep, wake, wake, free_through_hook, scopes, scopes,
        lambda: attempt(lambda: allocator.prepare().wait(0.01)),
        lambda: attempt(lambda: allocator.discard("kv_cache")),
        lambda: attempt(allocator.release_backups),
        lambda: attempt(allocator.usage),
        lambda: attempt(allocator.close),
        lambda: attempt(lambda: allocator._preparation and allocator._preparation.stop()),
        lambda: attempt(lambda: allocator.free(allocator.malloc(PAGE, "extra"))),
    ]
    sender = threading.Thread(target=storm, daemon=True)
    sender.start()
    ends_at = time.monotonic() + float(os.environ["STORM_S"])
    turns = 0
    while time.monotonic() < ends_at:
        choice.choice(operations)()
        check()
        turns += 1
    """
REST = """
    done.set()
    sender.join()
    assert not COMPRESS_ON or allocator._compressor.on, "a signal was taken for a failure of a kernel"
    allocator.wake_up()
    check()
    assert set(states().values()) == {AWAKE}
    assert hits > 10, hits
    assert _core.suspend_driver_calls(10), "a block of using_cuda is left"
    _core.resume_driver_calls()
    free_everything()
    """


@pytest.mark.slow
@pytest.mark.parametrize("compress", ["off", "auto"])
def test_storm(compress: str) -> None:
    """Signals of three kinds whose handlers raise, and of one whose handler calls the allocator, in every call."""
    constants = f"COMPRESS, COMPRESS_ON = {compress!r}, {compress == 'auto'}\nimport ctypes, numpy as np\n"
    with ThreadPoolExecutor(2) as pool:
        runs = [
            pool.submit(
                run_script, constants, STORM, REST, timeout_s=STORM_S + HANGS_S, STORM_S=str(STORM_S), SEED=str(number)
            )
            for number in range(2)
        ]
    for run in runs:
        assert_clean_exit(run.result())


@pytest.mark.slow
def test_storm_at_exit() -> None:
    """However it ends, it ends."""
    constants = "COMPRESS, COMPRESS_ON = 'off', False\nimport ctypes, sys, numpy as np\n"
    rest = """
        preparations.append(allocator.prepare())
        armed = True
        sys.exit(0)
        """
    with ThreadPoolExecutor(2) as pool:
        runs = [
            pool.submit(run_script, constants, STORM, rest, STORM_S="0.05", SEED=str(number)) for number in range(6)
        ]
    for run in runs:
        assert run.result().returncode in (0, 1, -signal.SIGINT), run.result().stderr


FINALISERS = """
    import gc, logging, os, random, sys, threading, time

    choice = random.Random(int(os.environ["SEED"]))
    CuMemAllocator.tuning.prepare_piece_bytes = CuMemAllocator.tuning.slab_bytes = MIB
    logging.getLogger("cumem_sleep").setLevel(logging.ERROR)  # of preparations that a finaliser ends
    reset_simulation()
    import cumem_sleep.digest.digester
    cumem_sleep.digest.digester.sums_of = quick_sums
    allocator, memory = fresh_allocator(), Memory()
    contents = {}
    for tag in ("weights", "default", "weights", "weights"):
        address = allocator.malloc(PAGE, tag)
        contents[address] = memory.fill_random(address, PAGE)
    memory.close()
    ran, ended = {}, []

    class Garbage:
        made = 0

        def __init__(self):
            self.cycle, self.extra = self, 0
            if choice.random() < 0.1 and allocator.get_current_usage() < 32 * PAGE:
                self.extra = allocator.malloc(PAGE, "extra")

        def __del__(self):
            name = thread_name() or "python"
            ran[name] = ran.get(name, 0) + 1
            try:
                if self.extra:
                    allocator.free(self.extra)
                else:
                    choice.choice(calls)()
            except InvalidState:
                pass
            finally:
                ended.append(None)

    calls = [
        allocator.release_backups, allocator.usage, allocator.prepare, lambda: allocator.discard("kv_cache"),
        lambda: allocator.sleep(["weights", "default", "extra"]), allocator.wake_up, CuMemAllocator.get_instance,
        lambda: allocator._preparation and allocator._preparation.stop(),
    ]
    gc.set_threshold(5, 2, 2)
    done = threading.Event()

    def litter():
        while not done.is_set():
            if Garbage.made - sum(ran.values()) < 8:  # else they pile up, and all run at once
                Garbage.made += 1
                Garbage()
            time.sleep(0.0005)

    threads = [threading.Thread(target=litter) for _ in range(2)]
    for thread in threads:
        thread.start()
    ends_at = time.monotonic() + float(os.environ["STORM_S"])
    latest = ends_at + 40  # on a machine that hardly lets this process run
    everywhere = {"cumem-operation", "cumem-prepare", "python"}
    while (now := time.monotonic()) < ends_at or (not everywhere <= ran.keys() and now < latest):
        try:
            allocator.sleep(["weights", "default", "extra"])
            allocator.wake_up()
            allocator.prepare().wait(0.05)
        except InvalidState as error:
            assert "inside another operation" in str(error) or "written to" in str(error), error
    done.set()
    for thread in threads:
        thread.join()
    gc.set_threshold(0)
    deadline = time.monotonic() + 30
    while len(ended) < Garbage.made:  # a preparation's thread may be in the middle of a collection
        assert time.monotonic() < deadline, (Garbage.made, ran, len(ended))
        gc.collect()
        time.sleep(0.001)
    allocator.wake_up()
    for address, content in contents.items():
        assert memory.read(address, PAGE) == content
    memory.close()
    print(sorted(ran))
    free_everything()
    """


@pytest.mark.slow
def test_finalisers_on_every_thread() -> None:
    """The garbage collector runs them wherever it comes to: also on the layer's own threads."""
    with ThreadPoolExecutor(2) as pool:
        runs = [
            pool.submit(run_script, FINALISERS, timeout_s=STORM_S + HANGS_S, STORM_S=str(STORM_S), SEED=str(number))
            for number in range(2)
        ]
    seen = set()
    for run in runs:
        assert_clean_exit(run.result())
        seen |= set(eval(run.result().stdout))
    assert seen >= {"cumem-operation", "cumem-prepare", "python"}, seen
