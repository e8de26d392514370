"""verl and SGLang on one GPU: what verl asks of the engine around each step, with an engine that only has memory.

Not run with verl on a GPU yet. There it needs no change, only the folder in PYTHONPATH that
`cumem-sleep shim torch_memory_saver` prints, and `actor_rollout_ref.rollout.free_cache_engine=True`.

python examples/verl_rollout.py                           # a GPU
    CUMEM_SLEEP_DRIVER=sim python examples/verl_rollout.py    # the simulated driver
"""

from cumem_sleep import CuMemAllocator, DriverError
from cumem_sleep.integrations.torch_memory_saver import torch_memory_saver

MIB = 1 << 20
STEPS = 3


class SGLangEngine:
    """Its two regions, and what `release_memory_occupation` and `resume_memory_occupation` do with them."""

    def __init__(self, allocator: CuMemAllocator) -> None:
        """Weights have no backup: verl writes all of them before they are used again."""
        self.addresses = {}
        for tag, nbytes in (("weights", 64 * MIB), ("kv_cache", 256 * MIB)):
            with torch_memory_saver.region(tag, enable_cpu_backup=False):
                self.addresses[tag] = allocator.malloc(nbytes)

    def release_memory_occupation(self, tags: list[str]) -> None:
        """In the order that is asked for."""
        for tag in tags:
            torch_memory_saver.pause(tag)

    def resume_memory_occupation(self, tags: list[str]) -> None:
        """The same addresses again; what was there is not."""
        for tag in tags:
            torch_memory_saver.resume(tag)


def step(engine: SGLangEngine, allocator: CuMemAllocator) -> None:
    """One of verl's, from the end of a rollout to the end of the next."""
    engine.release_memory_occupation(["kv_cache", "weights"])
    assert not any(usage.mapped_bytes for usage in allocator.regions.usage().values())
    # Here the actor has the GPU: log probabilities, then its update.
    engine.resume_memory_occupation(["weights"])
    assert allocator.regions.usage()["kv_cache"].mapped_bytes == 0
    # Here verl sends the weights, bucket by bucket, with room for them where the cache will be.
    engine.resume_memory_occupation(["kv_cache"])
    # Here the engine generates.


def main() -> None:
    """Some steps; the last sleep and wake say what they did."""
    allocator = CuMemAllocator.get_instance()
    engine = SGLangEngine(allocator)
    addresses = dict(engine.addresses)
    for _ in range(STEPS):
        step(engine, allocator)
    print(allocator.regions.sleep())
    print(allocator.regions.wake())
    assert engine.addresses == addresses
    for address in addresses.values():
        allocator.free(address)
    print(f"{STEPS} steps of verl's calls")


if __name__ == "__main__":
    try:
        main()
    except DriverError as error:  # no GPU: it says what to do
        raise SystemExit(f"verl_rollout.py: {error}") from None
