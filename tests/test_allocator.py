"""The allocator suite: what every user may rely on. Runs on the simulated driver and on a real GPU alike."""

from __future__ import annotations

import gc
import importlib.util
import logging
import re
import sys
import weakref
from collections.abc import Callable

import numpy as np
import pytest
from filled import fill
from support import MIB, PAGE, SIMULATED, Memory, in_thread

import cumem_sleep
from cumem_sleep import (
    CuMemAllocator,
    InvalidArgument,
    InvalidArgumentType,
    InvalidState,
    OutOfDeviceMemory,
    Settings,
    TagUsage,
    _core,
    sim,
)
from cumem_sleep import allocator as allocator_module
from cumem_sleep.core import misspelt
from cumem_sleep.core.pools import Pools
from cumem_sleep.for_plugin import prepare_to_end

MakeAllocator = Callable[..., CuMemAllocator]


class TestMalloc:
    @pytest.mark.parametrize(
        ("nbytes", "whole"),
        [(1, PAGE), (PAGE - 1, PAGE), (PAGE, PAGE), (PAGE + 1, 2 * PAGE), (5 * MIB, 3 * PAGE)],
    )
    def test_rounds_up_to_the_granularity(self, allocator: CuMemAllocator, nbytes: int, whole: int) -> None:
        assert allocator.malloc(nbytes) % PAGE == 0
        assert allocator.usage() == {"default": TagUsage(segments=1, bytes=whole, mapped_bytes=whole)}
        assert allocator.get_current_usage() == whole

    def test_takes_and_gives_back_device_memory(self, allocator: CuMemAllocator) -> None:
        address = allocator.malloc(PAGE)
        before, _ = _core.memory_info(0)
        other = allocator.malloc(8 * PAGE)
        assert _core.memory_info(0)[0] <= before - 8 * PAGE
        allocator.free(other)
        assert _core.memory_info(0)[0] == before
        allocator.free(address)

    def test_addresses_differ(self, allocator: CuMemAllocator) -> None:
        addresses = [allocator.malloc(PAGE) for _ in range(8)]
        assert len(set(addresses)) == 8
        assert [segment.address for segment in _core.segments()] == addresses  # oldest first

    def test_tags(self, allocator: CuMemAllocator) -> None:
        with allocator.use_memory_pool("weights"):
            allocator.malloc(PAGE)
            with allocator.use_memory_pool("kv_cache"):
                allocator.malloc(PAGE)
                allocator.malloc(PAGE, "named")
            with allocator.use_memory_pool():
                allocator.malloc(PAGE)
            allocator.malloc(PAGE)
        allocator.malloc(PAGE)
        tags = [segment.tag for segment in _core.segments()]
        assert tags == ["weights", "kv_cache", "named", "default", "weights", "default"]

    def test_a_pool_is_left_on_an_error(self, allocator: CuMemAllocator) -> None:
        with pytest.raises(KeyError), allocator.use_memory_pool("weights"):
            raise KeyError
        allocator.malloc(PAGE)
        assert set(allocator.usage()) == {"default"}

    def test_a_pool_is_this_threads_own(self, allocator: CuMemAllocator) -> None:
        with allocator.use_memory_pool("weights"):
            in_thread(lambda: allocator.malloc(PAGE))
        assert set(allocator.usage()) == {"default"}

    def test_larger_than_the_device(self, allocator: CuMemAllocator) -> None:
        allocator.malloc(PAGE)
        free_bytes, total_bytes = _core.memory_info(0)
        for nbytes in (total_bytes + 1, total_bytes * 1000, 2**63 - 1):
            with pytest.raises(OutOfDeviceMemory) as raised:
                allocator.malloc(nbytes)
            assert raised.value.needed_bytes >= nbytes
            assert raised.value.free_bytes == free_bytes
            assert raised.value.error == "CUDA_ERROR_OUT_OF_MEMORY"
        assert _core.memory_info(0)[0] == free_bytes

    def test_larger_than_what_is_free(self, allocator: CuMemAllocator) -> None:
        allocator.malloc(PAGE)
        free_bytes, _ = _core.memory_info(0)
        whole = (free_bytes // PAGE + 1) * PAGE
        with pytest.raises(OutOfDeviceMemory) as raised:
            allocator.malloc(whole)
        assert (raised.value.call, raised.value.needed_bytes) == ("cuMemCreate", whole)
        assert raised.value.free_bytes == free_bytes
        assert _core.memory_info(0)[0] == free_bytes
        assert len(_core.segments()) == 1


class TestFree:
    def test_twice(self, allocator: CuMemAllocator) -> None:
        address = allocator.malloc(PAGE)
        allocator.free(address)
        with pytest.raises(InvalidState, match=f"0x{address:x}"):
            allocator.free(address)

    def test_of_an_address_that_is_not_ours(self, allocator: CuMemAllocator) -> None:
        address = allocator.malloc(2 * PAGE)
        for wrong in (0, 1, address + 1, address + PAGE, address - PAGE, 2**47, 2**64 - 1):
            with pytest.raises(InvalidState, match="not the address"):
                allocator.free(wrong)
        assert allocator.get_current_usage() == 2 * PAGE

    @pytest.mark.parametrize("level", [1, 2])
    def test_of_what_sleeps(self, allocator: CuMemAllocator, memory: Memory, level: int) -> None:
        filled = fill(allocator, memory, "weights", "kv_cache", "default")
        allocator.sleep(level)
        for address, _ in filled.values():
            allocator.free(address)
        assert allocator.usage() == {}
        assert allocator._store.memory.bytes == 0


class TestReports:
    def test_add_up(self, allocator: CuMemAllocator, memory: Memory, caplog: pytest.LogCaptureFixture) -> None:
        filled = fill(allocator, memory, "weights", "default", "kv_cache")
        allocator.sleep()
        allocator.wake_up()
        memory.fill_random(filled["default"][0], PAGE)
        with caplog.at_level(logging.INFO, "cumem_sleep"):
            slept = allocator.sleep()
            woken = allocator.wake_up()
        assert (slept.freed_bytes, slept.copied_bytes, slept.clean_bytes, slept.dropped_bytes) == (
            3 * PAGE,
            PAGE,
            PAGE,
            PAGE,
        )
        assert (woken.mapped_bytes, woken.restored_bytes, woken.verified_bytes) == (3 * PAGE, 2 * PAGE, 2 * PAGE)
        for report in (slept, woken):
            assert report.simulated is SIMULATED
            assert str(report).startswith("[simulated] ") is SIMULATED
            assert 0 < sum(report.phases.values()) <= report.seconds
            assert all(seconds >= 0 for seconds in report.phases.values())
        assert list(slept.phases) == ["quiesce", "host_memory", "digest", "copy", "check", "release"]
        assert list(woken.phases) == ["copy", "map", "verify"]
        assert [record.getMessage() for record in caplog.records] == [
            f"cumem-sleep: {report}" for report in (slept, woken)
        ]
        assert "freed 6.00 MiB" in str(slept)
        assert "copied 2.00 MiB" in str(slept)
        assert "mapped 6.00 MiB" in str(woken)

    def test_usage(self, allocator: CuMemAllocator, memory: Memory) -> None:
        fill(allocator, memory, "weights", "kv_cache")
        allocator.malloc(3 * PAGE, "weights")
        allocator.sleep()
        allocator.wake_up("weights")
        assert allocator.usage() == {
            "weights": TagUsage(
                segments=2, bytes=4 * PAGE, mapped_bytes=4 * PAGE, host_bytes=4 * PAGE, backed_up_bytes=4 * PAGE
            ),
            "kv_cache": TagUsage(segments=1, bytes=PAGE, asleep_segments=1),
        }
        assert allocator.get_current_usage() == 5 * PAGE


@pytest.mark.parametrize("tags", [["weights", "kv_cache"], []])
def test_tags_may_be_an_array(allocator: CuMemAllocator, tags: list[str]) -> None:
    allocator.malloc(PAGE, "weights")
    assert allocator.sleep(np.array(tags, str)).freed_bytes == PAGE
    assert allocator.wake_up(np.array(["weights", "kv_cache"])).mapped_bytes == PAGE


class TestBadInput:
    """Every bad value is an error that names it, and nothing changes."""

    @pytest.fixture
    def used(self, allocator: CuMemAllocator) -> CuMemAllocator:
        allocator.malloc(PAGE, "weights")
        return allocator

    @pytest.fixture(autouse=True)
    def nothing_changes(self, used: CuMemAllocator) -> object:
        before = used.usage()
        yield
        assert used.usage() == before

    @pytest.mark.parametrize("level", [4, -1, True, False, 2**70])
    def test_level(self, used: CuMemAllocator, level: int) -> None:
        with pytest.raises(InvalidArgument, match=re.escape(f"level={level!r}")):
            used.sleep(level)

    @pytest.mark.parametrize("tags", [1.5, b"weights", [1], [None], ["weights", b"x"], object(), np.array("weights")])
    def test_tags_of_the_wrong_type(self, used: CuMemAllocator, tags: object) -> None:
        with pytest.raises(InvalidArgumentType, match="tag"):
            used.sleep(offload_tags=tags)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentType, match=r"tag|level"):
            used.sleep(tags)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentType, match="tag"):
            used.wake_up(tags)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentType, match="tag"):
            used.discard(tags)  # type: ignore[arg-type]

    @pytest.mark.parametrize("tags", ["", [""], ["weights", ""]])
    def test_empty_tag(self, used: CuMemAllocator, tags: str | list[str]) -> None:
        for call in (used.sleep, used.wake_up, used.discard):
            with pytest.raises(InvalidArgument, match="tag=''"):
                call(tags)  # type: ignore[arg-type]

    @pytest.mark.parametrize("tags", ["weigths", ["weights", "kv-cache"]])
    def test_unknown_tag(self, used: CuMemAllocator, tags: str | list[str]) -> None:
        """A misspelt tag must not pass for nothing to do."""
        for call in (used.wake_up, used.discard):
            with pytest.raises(InvalidArgument, match=r"weigths|kv-cache.*known are.*weights"):
                call(tags)

    @pytest.mark.parametrize("tag", ["weights", "kv_cache", "default"])
    def test_known_tags_without_memory_are_fine(self, used: CuMemAllocator, tag: str) -> None:
        used.free(used.malloc(PAGE))
        used.free(used.malloc(PAGE, "kv_cache"))
        assert used.wake_up(tag).mapped_bytes == 0

    @pytest.mark.parametrize(
        ("nbytes", "error"),
        [
            (0, InvalidArgument),
            (-1, InvalidArgument),
            (-PAGE, InvalidArgument),
            (True, InvalidArgumentType),
            (1.0, InvalidArgumentType),
            ("2MiB", InvalidArgumentType),
            (None, InvalidArgumentType),
        ],
    )
    def test_size(self, used: CuMemAllocator, nbytes: int, error: type[Exception]) -> None:
        with pytest.raises(error, match=re.escape(f"nbytes={nbytes!r}")):
            used.malloc(nbytes)

    @pytest.mark.parametrize(
        ("device", "error"),
        [(-1, InvalidArgument), (64, InvalidArgument), (2**40, InvalidArgument), (True, InvalidArgumentType)],
    )
    def test_device(self, used: CuMemAllocator, device: int, error: type[Exception]) -> None:
        with pytest.raises(error, match=f"device={device}"):
            used.malloc(PAGE, device=device)

    @pytest.mark.parametrize("tag", [1, b"weights", ["weights"], True])
    def test_tag_is_no_string(self, used: CuMemAllocator, tag: str) -> None:
        with pytest.raises(InvalidArgumentType, match=re.escape(f"tag={tag!r}")):
            used.malloc(PAGE, tag)
        with pytest.raises(InvalidArgumentType, match="tag="), used.use_memory_pool(tag):
            pass

    def test_tag_is_empty(self, used: CuMemAllocator) -> None:
        with pytest.raises(InvalidArgument, match="tag=''"):
            used.malloc(PAGE, "")
        with pytest.raises(InvalidArgument, match="tag=''"), used.use_memory_pool(""):
            pass

    @pytest.mark.parametrize("tag", ["größe", "重み", "a" * 1000, "with space", "%s", "line\nbreak"])
    def test_any_other_string_is_a_tag(self, used: CuMemAllocator, memory: Memory, tag: str) -> None:
        address = used.malloc(PAGE, tag)
        content = memory.fill_random(address, PAGE)
        used.sleep(offload_tags=[tag, "weights"])
        used.wake_up(tag)
        assert used.usage()[tag].bytes == PAGE
        assert memory.read(address, PAGE) == content
        used.free(address)
        used.wake_up()
        used.release_backups()

    @pytest.mark.parametrize(
        ("address", "error"),
        [(-1, InvalidArgument), (True, InvalidArgumentType), (1.0, InvalidArgumentType), (None, InvalidArgumentType)],
    )
    def test_address(self, used: CuMemAllocator, address: int, error: type[Exception]) -> None:
        with pytest.raises(error, match=re.escape(f"address={address!r}")):
            used.free(address)

    @pytest.mark.parametrize("number", [2**64, -(2**64), 10**400, 10**5000, -(10**5000)], ids=range(5))
    def test_huge_numbers(self, used: CuMemAllocator, number: int) -> None:
        """Python refuses to write thousands of digits."""
        for call in (
            used.malloc,
            lambda number: used.malloc(PAGE, device=number),
            used.free,
            used.sleep,
            lambda number: used.sleep(number, "weights"),
            lambda number: used.sleep(offload_tags=number),
            lambda number: used.malloc(PAGE, number),
            lambda number: used.read_backup(number, 1),
            lambda number: used.read_backup(1, number),
            used.regions.set_margin_bytes,
        ):
            with pytest.raises(InvalidArgument, match="=") as raised:
                call(number)
            assert len(str(raised.value)) < 300

    def test_address_beyond_64_bits(self, used: CuMemAllocator) -> None:
        with pytest.raises(InvalidState):
            used.free(2**64)

    @pytest.mark.parametrize("copy", [None, "no", 0])
    def test_flag(self, used: CuMemAllocator, copy: bool) -> None:
        with pytest.raises(InvalidArgumentType, match=f"copy={copy!r}"):
            used.read_backup(_core.segments()[0].address, 1, copy=copy)

    def test_a_tag_of_a_class_of_its_own(self, used: CuMemAllocator) -> None:
        """It need not even have a hash."""

        class Tag(str):
            __slots__ = ()

            def __eq__(self, other: object) -> bool:
                return str.__eq__(self, other)

            __hash__ = None  # type: ignore[assignment]

        address = used.malloc(PAGE, Tag("mine"))
        assert used.usage()["mine"].segments == 1
        with used.use_memory_pool(Tag("mine")), used.regions.use(Tag("mine")):
            assert not used.regions.has(Tag("mine"))
        used.sleep(offload_tags=[Tag("mine"), Tag("weights")])
        used.wake_up(Tag("mine"))
        used.wake_up(Tag("weights"))
        used.free(address)
        used.release_backups()

    def test_settings(self) -> None:
        with pytest.raises(InvalidArgumentType, match="settings='sim'"):
            CuMemAllocator("sim")  # type: ignore[arg-type]

    def test_errors_are_of_pythons_kinds_too(self, used: CuMemAllocator) -> None:
        with pytest.raises(ValueError, match="level"):
            used.sleep(4)
        with pytest.raises(TypeError, match="tag"):
            used.malloc(PAGE, 1)  # type: ignore[arg-type]
        with pytest.raises(RuntimeError):  # what vLLM's allocator raises
            used.free(1)


class TestInstances:
    def test_get_instance(self, allocator: CuMemAllocator) -> None:
        assert CuMemAllocator.get_instance() is allocator
        assert CuMemAllocator.instance is allocator

    def test_none_beside_one_with_memory(self, allocator: CuMemAllocator) -> None:
        address = allocator.malloc(PAGE)
        with pytest.raises(InvalidState, match="get_instance"):
            CuMemAllocator()
        assert CuMemAllocator.get_instance() is allocator
        allocator.free(address)
        replacement = CuMemAllocator(Settings(driver=allocator.settings.driver, poison=True))
        assert CuMemAllocator.get_instance() is replacement

    @pytest.mark.sim  # elsewhere fixtures look after its devices
    def test_one_that_was_replaced_goes_at_once(self, memory: Memory) -> None:
        """And what it has in a vault with it: nobody waits for the garbage collector."""
        replaced = CuMemAllocator(Settings(driver="sim"))
        fill(replaced, memory, "weights")
        replaced.sleep()
        replaced.wake_up()
        with replaced.regions.use("region"):
            pass
        for segment in _core.segments():
            replaced.free(segment.address)
        parts = [weakref.ref(part) for part in (replaced, replaced._operations, replaced._digester)]
        gc.collect()
        gc.disable()
        try:
            CuMemAllocator(Settings(driver="sim"))
            with pytest.raises(InvalidState, match="was replaced by a newer one"):
                replaced.malloc(PAGE)
            del replaced
            assert [part() for part in parts] == [None] * len(parts)
        finally:
            gc.enable()

    @pytest.mark.sim
    @pytest.mark.parametrize("part", ["DeviceDigester", "Pools", "Operations", "UsedTags"])
    def test_one_that_was_not_made_can_be_ended(self, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
        """At exit all that there are still are ended, and an error there would leave the others running."""
        made: list[CuMemAllocator] = []

        def interrupted(*_: object, **__: object) -> None:
            made.extend(allocator_module._allocators)
            raise KeyboardInterrupt

        monkeypatch.setattr(allocator_module, part, interrupted)
        before = set(allocator_module._allocators)
        with pytest.raises(KeyboardInterrupt):
            CuMemAllocator(Settings(driver="sim"))
        for half in set(made) - before:
            half._stop_background_work()
            prepare_to_end(half)

    def test_cudagraph_pool_needs_pytorch(self, allocator: CuMemAllocator) -> None:
        if not SIMULATED:
            pytest.skip("PyTorch may reach this GPU")
        with pytest.raises(InvalidState, match="PyTorch"), allocator.cudagraph_pool():
            pass

    def test_totals_add_up_what_was_done(self, allocator: CuMemAllocator, memory: Memory) -> None:
        fill(allocator, memory, "weights", "kv_cache")
        reports = [allocator.sleep(), allocator.wake_up(), allocator.sleep(level=2), allocator.wake_up()]
        allocator.wake_up()  # nothing to do, so it does not count
        discarded = allocator.discard("kv_cache")
        totals = allocator.totals()
        assert {name: (total.count, total.failures) for name, total in totals.items()} == {
            "sleep": (2, 0),
            "wake": (2, 0),
            "discard": (1, 0),
        }
        assert totals["sleep"].bytes == {
            "freed": 4 * PAGE,
            "copied": PAGE,
            "clean": 0,
            "found": 0,
            "dropped": 3 * PAGE,
            "kept": 0,
            "stored": PAGE,
        }
        done = {"mapped": 4 * PAGE, "restored": PAGE, "verified": PAGE, "kept": 0, "stored": PAGE}
        assert totals["wake"].bytes == done
        assert totals["discard"].bytes["freed"] == PAGE
        for name, first, second in (("sleep", 0, 2), ("wake", 1, 3)):
            assert totals[name].seconds == pytest.approx(reports[first].seconds + reports[second].seconds)
            assert sum(totals[name].phases.values()) == pytest.approx(
                sum(sum(reports[number].phases.values()) for number in (first, second))
            )
        assert totals["discard"].phases == discarded.phases

    @pytest.mark.sim
    def test_totals_count_what_failed(self, allocator: CuMemAllocator, memory: Memory) -> None:
        fill(allocator, memory, "weights")
        allocator.sleep()
        sim.fail("cuMemCreate")
        with pytest.raises(OutOfDeviceMemory):
            allocator.wake_up()
        allocator.wake_up()
        assert (allocator.totals()["wake"].count, allocator.totals()["wake"].failures) == (1, 1)


class TestEmptyPools:
    """A pool that nothing was allocated in: its memory does not sleep, and who entered it does not know."""

    @pytest.fixture(autouse=True)
    def _anew(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Pools, "warned_of_empty", set())

    @pytest.mark.sim
    def test_are_told_of_once_with_the_reason(
        self, allocator: CuMemAllocator, caplog: pytest.LogCaptureFixture
    ) -> None:
        for tag in ("weights", "weights", "lora"):
            with allocator.use_memory_pool(tag):
                pass
        (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert "nothing was allocated in the memory pool 'weights', so nothing of it can sleep" in warning
        assert "on the simulated driver PyTorch does not allocate from this layer" in warning

    @pytest.mark.parametrize(
        ("torch_pools", "why"),
        [
            (None, "PyTorch is not installed, or reaches no GPU"),
            (object(), "built on the CPU and moved to the GPU later"),
        ],
    )
    def test_on_a_gpu(
        self,
        allocator: CuMemAllocator,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        torch_pools: object,
        why: str,
    ) -> None:
        with monkeypatch.context() as context:
            context.setattr(_core, "driver_is_simulated", lambda: False)
            context.setattr(allocator._pools, "found", torch_pools)
            allocator._pools.warn_of_empty("weights")
        assert why in caplog.text

    @pytest.mark.parametrize(("filled", "empty"), [("weights", "kv_cache"), ("kv_cache", "weights")])
    def test_are_told_of_although_the_other_is_not_empty(
        self, allocator: CuMemAllocator, caplog: pytest.LogCaptureFixture, filled: str, empty: str
    ) -> None:
        with allocator.use_memory_pool(filled):
            allocator.malloc(PAGE)
        for _ in range(2):
            with allocator.use_memory_pool(empty):
                pass
        assert caplog.text.count("nothing was allocated") == 1
        assert f"in the memory pool {empty!r}" in caplog.text

    def test_memory_in_the_pool_is_no_reason(self, allocator: CuMemAllocator, caplog: pytest.LogCaptureFixture) -> None:
        with allocator.use_memory_pool("weights"):
            allocator.malloc(PAGE)
        with allocator.use_memory_pool("lora"):  # optional parts may be empty
            pass
        assert "nothing was allocated" not in caplog.text


class TestMisspeltVariables:
    @pytest.fixture(autouse=True)
    def _anew(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(misspelt, "_warned_of", set())

    def test_are_logged_once(
        self,
        make_allocator: MakeAllocator,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.setenv("CUMEM_SLEEP_RETAIN_BACKUP", "0")
        monkeypatch.setenv("CUMEM_SLEEP_XYZ", "0")
        for _ in range(2):
            make_allocator()
        warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert warnings == [
            "CUMEM_SLEEP_RETAIN_BACKUP is set, but nothing reads it: did you mean CUMEM_SLEEP_RETAIN_BACKUPS?",
            "CUMEM_SLEEP_XYZ is set, but nothing reads it",
        ]


@pytest.mark.sim
def test_cupy_allocator_on_the_simulated_driver_says_that_cupy_cannot_run_there(
    allocator: CuMemAllocator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: find_spec("json" if name == "cupy" else name, *more)
    )
    monkeypatch.setitem(sys.modules, "cupy", None)  # importing it would fail
    with pytest.raises(InvalidState, match=r"needs a GPU: .*CUMEM_SLEEP_DRIVER=sim.* only `malloc` allocates"):
        cumem_sleep.cupy_allocator()
    monkeypatch.setattr(Pools, "warned_of_empty", set())
    with allocator.use_memory_pool("weights"):
        pass
    assert "PyTorch does not allocate from this layer, nor does CuPy, only `malloc`" in caplog.text


def test_cupy_allocator_without_cupy_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "cupy" else find_spec(name, *more)
    )
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'cumem-sleep\[cupy13\]' for CUDA 13") as caught:
        cumem_sleep.cupy_allocator()
    assert caught.value.name == "cupy"
