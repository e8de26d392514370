"""An inference server's day: load a model, serve, sleep while idle, wake, serve the same answers.

python examples/inference.py                            # PyTorch and a GPU
CUMEM_SLEEP_DRIVER=sim python examples/inference.py     # neither: memory without a model, on the simulated driver
"""

import importlib.util

from cumem_sleep import CuMemAllocator, DriverError

MIB = 1 << 20


def with_a_model(allocator: CuMemAllocator) -> None:
    """What a PyTorch server does."""
    import torch

    with allocator.use_memory_pool("weights"), torch.device("cuda"):
        model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))).requires_grad_(False)
    with allocator.use_memory_pool("kv_cache"):
        cache = torch.zeros(64 * MIB, device="cuda")
    question = torch.randn(4, 1024, device="cuda")
    before = model(question).clone()

    print(allocator.sleep(level=1))
    print(allocator.wake_up())
    cache.zero_()  # it was dropped: its bytes are undefined

    assert torch.equal(model(question), before)
    print("the same question has the same answer")


def with_addresses(allocator: CuMemAllocator) -> None:
    """The same without PyTorch on a GPU: addresses instead of tensors."""
    weights = [allocator.malloc(20 * MIB, tag="weights") for _ in range(8)]
    cache = allocator.malloc(256 * MIB, tag="kv_cache")

    print(allocator.sleep(level=1))
    assert allocator.usage()["weights"].mapped_bytes == 0
    print(allocator.wake_up())
    assert allocator.usage()["weights"].mapped_bytes == 160 * MIB

    print("the same addresses have memory again; there is no model to ask without PyTorch and a GPU")
    for address in (*weights, cache):
        allocator.free(address)


def reaches_a_gpu() -> bool:
    """Whether PyTorch is there, and does."""
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def main() -> None:
    """Use PyTorch if it reaches a GPU, otherwise plain addresses."""
    allocator = CuMemAllocator.get_instance()
    if allocator.settings.driver == "cuda" and reaches_a_gpu():
        with_a_model(allocator)
    else:
        with_addresses(allocator)


if __name__ == "__main__":
    try:
        main()
    except DriverError as error:  # no GPU: it says what to do
        raise SystemExit(f"inference.py: {error}") from None
