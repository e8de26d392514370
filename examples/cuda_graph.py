"""A CUDA graph that was captured before the sleep replays after the wake: no address has changed.

python examples/cuda_graph.py       # needs PyTorch and a GPU
"""

from cumem_sleep import CuMemAllocator


def main() -> None:
    """Capture, replay, sleep, wake, replay."""
    try:
        import torch
    except ImportError:
        raise SystemExit("cuda_graph.py needs PyTorch: pip install torch") from None
    if not torch.cuda.is_available():
        raise SystemExit("cuda_graph.py needs a GPU that PyTorch reaches: there are no graphs on the simulated driver")

    allocator = CuMemAllocator.get_instance()
    with allocator.use_memory_pool("weights"):
        weight = torch.randn(4096, 4096, device="cuda")
    x = torch.randn(16, 4096, device="cuda")
    torch.relu(x @ weight)  # warms cuBLAS up, outside of the capture

    graph = torch.cuda.CUDAGraph()
    with allocator.cudagraph_pool() as pool, torch.cuda.graph(graph, pool=pool):
        y = torch.relu(x @ weight)
    graph.replay()
    before = y.clone()

    print(allocator.sleep(level=1))  # the weights, and the memory of the graph
    print(allocator.wake_up())

    graph.replay()
    assert torch.equal(y, before)
    print("the graph captured before the sleep gives the same result")


if __name__ == "__main__":
    main()
