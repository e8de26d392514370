"""slime on one GPU: its Megatron actor is one region that is paused whole, while SGLang generates.

Not run with slime on a GPU yet. There it needs no change, only the folder in PYTHONPATH that
`cumem-sleep shim torch_memory_saver` prints, and `--colocate`: slime puts the library that lies beside the package into
LD_PRELOAD for its actors, with TMS_INIT_ENABLE=1 and backups. This program opens the region itself.

python examples/slime_actor.py                           # a GPU
    CUMEM_SLEEP_DRIVER=sim python examples/slime_actor.py    # the simulated driver
"""

from cumem_sleep import CuMemAllocator, DriverError
from cumem_sleep.integrations.torch_memory_saver import torch_memory_saver

MIB = 1 << 20
STEPS = 3


class Actor:
    """The memory of slime's: parameters and optimizer with a backup, and what it leaves out of that."""

    def __init__(self, allocator: CuMemAllocator) -> None:
        """All that is made inside sleeps, but for communication buffers."""
        self.addresses = []
        with torch_memory_saver.region("default", enable_cpu_backup=True):
            self.addresses.append(allocator.malloc(64 * MIB))
            with torch_memory_saver.disable():
                self.addresses.append(allocator.malloc(2 * MIB))

    def sleep(self) -> None:
        """As soon as it has trained; its process groups are gone by then."""
        torch_memory_saver.pause()

    def wake_up(self) -> None:
        """Every byte is as it was: the optimizer goes on."""
        torch_memory_saver.resume()


def main() -> None:
    """Some steps; the last sleep and wake say what they did."""
    allocator = CuMemAllocator.get_instance()
    actor = Actor(allocator)
    for _ in range(STEPS):
        actor.sleep()
        assert allocator.regions.usage()["default"].mapped_bytes == 0
        # Here SGLang wakes its weights, takes the new ones, wakes its cache, generates and gives all of it back.
        actor.wake_up()
        # Here the actor trains.
    print(allocator.regions.sleep())
    print(allocator.regions.wake())
    for address in actor.addresses:
        allocator.free(address)
    print(f"{STEPS} steps of slime's calls")


if __name__ == "__main__":
    try:
        main()
    except DriverError as error:  # no GPU: it says what to do
        raise SystemExit(f"slime_actor.py: {error}") from None
