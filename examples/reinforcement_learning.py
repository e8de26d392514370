"""Between rollouts the trainer has the GPU: sleep at level 2, wake the weights, write new ones, then wake the cache.

Level 2 keeps nothing of the weights and the cache, so it needs no host memory. The cache wakes last: the trainer may
need room while it writes the weights.

python examples/reinforcement_learning.py                           # PyTorch and a GPU
    CUMEM_SLEEP_DRIVER=sim python examples/reinforcement_learning.py    # the calls alone, on the simulated driver
"""

import importlib.util
from collections.abc import Callable

from cumem_sleep import CuMemAllocator, DriverError

MIB = 1 << 20
ROUNDS = 3


def train_and_update(allocator: CuMemAllocator, write_weights: Callable[[int], None]) -> None:
    """What happens between two rollouts, a few times."""
    for number in range(ROUNDS):
        print(allocator.sleep(level=2))
        # Here the trainer has the GPU.
        print(allocator.wake_up(tags=["weights"]))
        assert allocator.usage()["kv_cache"].mapped_bytes == 0
        write_weights(number)
        print(allocator.wake_up(tags=["kv_cache"]))
        # Here the engine generates, with an empty cache and the new weights.


def with_a_model(allocator: CuMemAllocator) -> None:
    """What an engine on PyTorch does."""
    import torch

    with allocator.use_memory_pool("weights"), torch.device("cuda"):
        model = torch.nn.Linear(4096, 4096).requires_grad_(False)
    with allocator.use_memory_pool("kv_cache"):
        cache = torch.zeros(64 * MIB, device="cuda")
    weights = {name: tensor.cpu() for name, tensor in model.state_dict().items()}  # the trainer's copy

    def write_weights(number: int) -> None:
        for name, tensor in weights.items():
            weights[name] = tensor + number
        model.load_state_dict(weights)

    train_and_update(allocator, write_weights)
    assert all(torch.equal(tensor.cpu(), weights[name]) for name, tensor in model.state_dict().items())
    cache.zero_()
    print("the engine has the trainer's weights")


def with_addresses(allocator: CuMemAllocator) -> None:
    """The same without PyTorch."""
    addresses = [allocator.malloc(64 * MIB, tag="weights"), allocator.malloc(256 * MIB, tag="kv_cache")]
    train_and_update(allocator, lambda number: print(f"round {number}: the trainer would write here"))
    for address in addresses:
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
        raise SystemExit(f"reinforcement_learning.py: {error}") from None
