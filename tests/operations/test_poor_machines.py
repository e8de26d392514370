"""Sleep, wake and prepare where the kernel refuses advice and modules are missing."""

from __future__ import annotations

import platform

import pytest
from support import assert_clean_exit, run_script

CYCLES = """
    reset_simulation()
    allocator, memory = fresh_allocator(), Memory()
    contents = {}
    for tag in ("weights", "default"):
        address = allocator.malloc(4 * PAGE, tag)
        contents[address] = memory.fill_random(address, 4 * PAGE)
    memory.close()

    def check():
        for address, content in contents.items():
            assert memory.read(address, 4 * PAGE) == content
        memory.close()

    assert allocator.sleep().copied_bytes == 8 * PAGE
    assert allocator.wake_up().verified_bytes == 8 * PAGE
    check()
    allocator.release_backups()
    preparation = allocator.prepare()
    assert preparation.wait(30)
    assert preparation.error is None, preparation.error
    assert allocator.sleep().copied_bytes == 0
    allocator.wake_up()
    check()
    free_everything()
    """
REFUSE_MADVISE = """
    # A filter of system calls: madvise with these kinds of advice is refused, as a kernel does that does not know them.
    import ctypes, errno, mmap, struct

    def statement(code, true, false, value):
        return struct.pack("HBBI", code, true, false, value)

    LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06
    MADVISE = 28
    statements = [
        statement(LOAD, 0, 0, 0),
        statement(EQUAL, 0, 3 + len(REFUSED), MADVISE),
        statement(LOAD, 0, 0, 16 + 2 * 8),
        *[statement(EQUAL, len(REFUSED) - place, 0, kind) for place, kind in enumerate(REFUSED)],
        statement(RETURN, 0, 0, 0x7FFF0000),
        statement(RETURN, 0, 0, 0x00050000 | errno.EINVAL),
        statement(RETURN, 0, 0, 0x7FFF0000),
    ]
    program = ctypes.create_string_buffer(b"".join(statements))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(statements), ctypes.addressof(program)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, header, 0, 0):
        print("no filter")
        raise SystemExit
    pages = mmap.mmap(-1, 1 << 21)
    for kind in REFUSED:
        with raises(OSError, "Invalid argument"):
            pages.madvise(kind)
    """


@pytest.mark.sim
class TestPoorMachines:
    @pytest.mark.slow
    @pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers of system calls are those of x86-64")
    @pytest.mark.parametrize("refused", [[14], [14, 23]], ids=["huge pages", "huge pages and populating"])
    def test_the_kernel_refuses_advice(self, refused: list[int]) -> None:
        process = run_script(f"REFUSED = {refused}", REFUSE_MADVISE, CYCLES)
        if process.stdout == "no filter\n":
            pytest.skip("no system-call filter here")
        assert_clean_exit(process)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "poverty",
        [
            "import resource; resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))",
            "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})",
            """
            from cumem_sleep import _core

            def start_all_the_same(worker, work):
                _core.allow_threads(1)
                start(worker, work)

            start, _core.Worker.start = _core.Worker.start, start_all_the_same  # of prepare, which is refused else
            _core.allow_threads(0)
            """,
        ],
        ids=["no locked memory", "one core", "no threads"],
    )
    def test_sleep_wake_and_prepare_work(self, poverty: str) -> None:
        assert_clean_exit(run_script(poverty, CYCLES))
