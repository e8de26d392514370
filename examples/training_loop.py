"""A trainer and an engine take turns on one GPU, by torch_memory_saver's calls: how much of a step is spent on that?

In each step the trainer works while the engine sleeps; then the engine wakes, takes the new weights in place, and
generates while the trainer's optimizer sleeps.

python examples/training_loop.py                           # PyTorch and a GPU
    CUMEM_SLEEP_DRIVER=sim python examples/training_loop.py    # the calls alone, on the simulated driver
"""

import importlib.util
import time
from collections.abc import Callable

from cumem_sleep import CuMemAllocator, DriverError
from cumem_sleep.integrations.torch_memory_saver import torch_memory_saver

MIB = 1 << 20
STEPS_WITH_A_MODEL, STEPS_WITHOUT = 100, 3


def run(steps: int, train: Callable[[], None], update: Callable[[], None], generate: Callable[[], None]) -> None:
    """The loop; says what share of it went into sleeping and waking."""
    start, spent_s = time.perf_counter(), 0.0

    def switch(call: Callable[[str], None], *tags: str) -> None:
        nonlocal spent_s
        before = time.perf_counter()
        for tag in tags:
            call(tag)
        spent_s += time.perf_counter() - before

    for _ in range(steps):
        switch(torch_memory_saver.pause, "kv_cache", "weights")
        train()
        switch(torch_memory_saver.pause, "optimizer")
        switch(torch_memory_saver.resume, "weights")
        update()
        switch(torch_memory_saver.resume, "kv_cache")
        generate()
        switch(torch_memory_saver.resume, "optimizer")
    share = spent_s / (time.perf_counter() - start)
    ms = 1000 * spent_s / steps
    print(f"{steps} steps: {share:.0%} of the time, {ms:.1f} ms a step, was spent on going to sleep and waking")
    allocator = CuMemAllocator.get_instance()
    print(allocator.regions.sleep())
    print(allocator.regions.wake())


def with_a_model() -> None:
    """A small model trains; an engine has a copy of it, and a cache."""
    import torch

    torch_memory_saver.retain_cpu_backup = True
    trained = torch.nn.Sequential(torch.nn.Linear(2048, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 2048)).cuda()
    optimizer = torch.optim.AdamW(trained.parameters())
    with torch_memory_saver.region("weights"), torch.device("cuda"):
        served = torch.nn.Sequential(torch.nn.Linear(2048, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 2048))
    with torch_memory_saver.region("kv_cache"):
        cache = torch.zeros(256 * MIB, device="cuda")
    x = torch.randn(256, 2048, device="cuda")

    def train() -> None:
        optimizer.zero_grad()
        trained(x).square().mean().backward()
        if optimizer.state:
            optimizer.step()
        else:
            with torch_memory_saver.region("optimizer", enable_cpu_backup=True):
                optimizer.step()  # the first step allocates the state

    def update() -> None:
        for mine, new in zip(served.parameters(), trained.parameters(), strict=True):
            mine.data.copy_(new.data)

    def generate() -> None:
        cache.zero_()
        with torch.no_grad():
            assert torch.equal(served(x), trained(x)), "the engine has other weights than the trainer"

    run(STEPS_WITH_A_MODEL, train, update, generate)


def with_addresses(allocator: CuMemAllocator) -> None:
    """The same calls without PyTorch."""
    addresses = []
    for tag, backup in (("weights", False), ("kv_cache", False), ("optimizer", True)):
        with torch_memory_saver.region(tag, enable_cpu_backup=backup):
            addresses.append(allocator.malloc(4 * MIB))
    run(STEPS_WITHOUT, lambda: None, lambda: None, lambda: None)
    for address in addresses:
        allocator.free(address)


def reaches_a_gpu() -> bool:
    """Whether PyTorch is there, and does."""
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def main() -> None:
    """With PyTorch where it has a GPU, otherwise with plain addresses."""
    allocator = CuMemAllocator.get_instance()
    if allocator.settings.driver == "cuda" and reaches_a_gpu():
        with_a_model()
    else:
        with_addresses(allocator)


if __name__ == "__main__":
    try:
        main()
    except DriverError as error:  # no GPU: it says what to do
        raise SystemExit(f"training_loop.py: {error}") from None
