"""Two processes on one GPU take turns: one sleeps before the other one wakes, so that each may take most of the memory.

python examples/two_processes.py                            # a GPU
CUMEM_SLEEP_DRIVER=sim python examples/two_processes.py     # simulated: there each process has a GPU of its own
"""

import multiprocessing
from multiprocessing.connection import Connection

from cumem_sleep import CuMemAllocator

MIB = 1 << 20
TURNS = 4


def serve(name: str, orders: Connection) -> None:
    """One model's process: allocates, sleeps at once, and then follows commands."""
    allocator = CuMemAllocator.get_instance()
    allocator.malloc(20 * MIB, tag="weights")
    allocator.malloc(640 * MIB, tag="kv_cache")
    allocator.sleep(level=1)
    orders.send("ready")
    while (order := orders.recv()) != "end":
        report = allocator.wake_up() if order == "wake" else allocator.sleep(level=1)
        print(f"{name}: {report}", flush=True)
        orders.send("done")


def main() -> None:
    """Start both, one after the other, and switch."""
    spawn = multiprocessing.get_context("spawn")  # CUDA does not survive a fork after its first use
    models: list[Connection] = []
    for name in ("A", "B"):
        ours, theirs = spawn.Pipe()
        spawn.Process(target=serve, args=(name, theirs), daemon=True).start()
        theirs.close()  # now only that process has it: if it ends, we are told, and do not wait for ever
        try:
            assert ours.recv() == "ready"  # it sleeps: the next one has the GPU to itself
        except EOFError:
            raise SystemExit(f"two_processes.py: model {name} did not start; its error is above") from None
        models.append(ours)
    for turn in range(TURNS):
        model = models[turn % 2]
        for order in ("wake", "sleep"):
            model.send(order)
            assert model.recv() == "done"
    for model in models:
        model.send("end")
    for process in multiprocessing.active_children():
        process.join()
    print(f"{TURNS} turns")


if __name__ == "__main__":
    main()
