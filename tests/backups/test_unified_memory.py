"""A GPU whose memory is the host's: one account for both, nothing is retained, and what does not fit is refused."""

from __future__ import annotations

import pytest
from support import assert_clean_exit, run_script

pytestmark = pytest.mark.sim

BEGIN = """
    import pytest

    allocator, memory = fresh_allocator(), Memory()
    warm_up = allocator.malloc(PAGE)  # the first allocation makes the context
    allocator.free(warm_up)

    def free_pages():
        return _core.memory_info(0)[0] // PAGE

    def malloc(pages, tag):
        address = allocator.malloc(pages * PAGE, tag)
        return address, memory.fill_random(address, pages * PAGE)

    def check(address, content):
        assert memory.read(address, len(content)) == content
"""
SCRIPTS = {
    "a cycle": """
    weights, cache = malloc(10, "weights"), malloc(4, "kv_cache")
    before = free_pages()
    for _ in range(3):
        assert allocator.sleep().copied_bytes == 10 * PAGE, "nothing was retained"
        assert allocator.usage()["weights"].host_bytes == 10 * PAGE
        assert free_pages() == before + 14 - 10, "the backup takes of the same memory"
        allocator.wake_up(retain_backups=True)
        check(*weights)
        assert allocator.usage()["weights"].host_bytes == 0
        assert free_pages() == before
    with pytest.raises(InvalidState, match="the GPU's memory is the host's"):
        allocator.prepare()
    allocator._prepare_where_there_is_room()
    assert allocator._preparation is None, "what is made would be dropped at once"
    """,
    "a cycle that keeps some of what it drops": """
    cache = malloc(4, "kv_cache")
    before = _core.memory_info(0)[0]
    for _ in range(2):
        assert allocator.sleep(keep={cache[0]: [(0, 4 * PAGE)]}).kept_bytes == 4 * PAGE
        assert allocator.wake_up().kept_bytes == 4 * PAGE
        check(*cache)
        assert before - _core.memory_info(0)[0] < PAGE, "all that stays is a table of some KiB"
    """,
    "a sleep that does not fit": """
    weights = malloc(20, "weights")
    with pytest.raises(OutOfHostMemory, match="unified memory"):
        allocator.sleep()
    assert allocator.usage()["weights"].asleep_segments == 0
    check(*weights)
    """,
    "a wake that does not fit": """
    weights = malloc(10, "weights")
    allocator.sleep()
    others = malloc(free_pages() - 9, "others")
    with pytest.raises(OutOfDeviceMemory, match="needed 20.00 MiB, free 18.00 MiB"):
        allocator.wake_up(["weights"])
    assert allocator.usage()["weights"].mapped_bytes == 0
    check(*others)
    allocator.free(others[0])
    allocator.wake_up()
    check(*weights)
    """,
    "a wake for which the host has too little": """
    from cumem_sleep import host_facts

    weights = malloc(4, "weights")
    allocator.sleep()
    available = host_facts.mem_available_bytes
    host_facts.mem_available_bytes = lambda *_, **__: 7 << 20
    with pytest.raises(OutOfDeviceMemory, match="needed 8.00 MiB, free 7.00 MiB"):
        allocator.wake_up()
    host_facts.mem_available_bytes = available
    host_facts.cgroup_available_bytes = lambda *_, **__: 0  # which does not count what GPUs take
    allocator.wake_up()
    check(*weights)
    """,
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_memory_that_gpu_and_host_share(name: str) -> None:
    environment = {"CUMEM_SLEEP_SIM_INTEGRATED": "1", "CUMEM_SLEEP_SIM_DEVICE_BYTES": str(64 << 20)}
    process = run_script(BEGIN, SCRIPTS[name], "memory.close(); free_everything()", **environment)
    assert_clean_exit(process)
