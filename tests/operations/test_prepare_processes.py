"""Backups made in the background while the process forks or exits."""

from __future__ import annotations

import pytest
from preparing import small_pieces  # noqa: F401  (autouse)
from support import assert_clean_exit, assert_thread_ends_in_order, run_script

BEGUN = """
    import sys, threading

    reset_simulation()
    allocator, memory = fresh_allocator(prepare_bytes_per_second=RATE), Memory()
    contents = {}
    for tag in ("weights", "default"):
        address = allocator.malloc(2 * PAGE, tag)
        contents[address] = memory.fill_random(address, 2 * PAGE)
    memory.close()
    CuMemAllocator.tuning.prepare_piece_bytes = MIB
    copied = threading.Event()
    copy = Preparation._copy

    def noted(*arguments):
        copied.set()
        return copy(*arguments)

    Preparation._copy = noted
    preparation = allocator.prepare()
    assert copied.wait(30)
    """


@pytest.mark.sim
class TestProcess:
    @pytest.mark.slow
    @pytest.mark.parametrize("rate", [1, 0])
    @pytest.mark.parametrize(
        "rest", ["", "sys.exit(0)", "preparation.wait(0.005)", "CuMemAllocator.instance = None; del allocator"]
    )
    def test_exit_meanwhile(self, rate: int, rest: str) -> None:
        """At one byte per second it would take weeks."""
        process = run_script(f"RATE = {rate}", BEGUN, rest, CUMEM_SLEEP_SIM_COPY_DELAY_US="5000")
        assert_clean_exit(process)

    def test_exit_ends_it_in_an_orderly_way(self) -> None:
        """Before the interpreter is taken down, not by that."""
        assert_thread_ends_in_order("RATE = 1", BEGUN, thread="preparation._worker")

    @pytest.mark.slow
    @pytest.mark.parametrize("as_python_does", [False, True])
    def test_fork_meanwhile(self, as_python_does: bool) -> None:
        process = run_script(
            "RATE = 1",
            BEGUN,
            f"""
            calls = (allocator.prepare, allocator.usage, allocator.sleep)
            fork_beside(preparation._worker, allocator, *calls, as_python_does={as_python_does})
            assert preparation.running
            assert allocator.sleep().copied_bytes == 4 * PAGE
            allocator.wake_up()
            for address, content in contents.items():
                assert memory.read(address, 2 * PAGE) == content
            memory.close()
            preparation.stop()
            assert preparation.error is None
            free_everything()
            """,
        )
        assert_clean_exit(process)
