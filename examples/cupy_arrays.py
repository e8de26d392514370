"""CuPy arrays that sleep and wake.

python examples/cupy_arrays.py      # needs CuPy (pip install cupy-cuda13x) and a GPU
"""

from cumem_sleep import CuMemAllocator, cupy_allocator


def main() -> None:
    """Allocate, sleep, wake, compare."""
    try:
        import cupy
    except ImportError:
        raise SystemExit("cupy_arrays.py needs CuPy: pip install cupy-cuda13x (or cupy-cuda12x)") from None
    if not cupy.cuda.is_available():
        raise SystemExit("cupy_arrays.py needs a GPU that CuPy reaches: the simulated driver runs no kernels")

    # Use CuPy's own pool, which packs small arrays: each allocation of the layer takes whole 2 MiB pages.
    cupy.cuda.set_allocator(cupy.cuda.MemoryPool(cupy_allocator(tag="weights")).malloc)
    allocator = CuMemAllocator.get_instance()
    array = cupy.random.random((4096, 4096))
    before = float(array.sum())

    print(allocator.sleep(level=1))
    print(allocator.wake_up())

    assert float(array.sum()) == before
    print("the array has the same sum")


if __name__ == "__main__":
    main()
