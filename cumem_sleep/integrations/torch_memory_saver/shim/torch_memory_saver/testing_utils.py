"""What torch_memory_saver's own test programs import."""

import torch

from .utils import is_xpu

__all__ = ["empty_cache", "get_and_print_gpu_memory", "get_device", "is_xpu"]


def get_device() -> str:
    """`cuda`."""
    return "cuda"


def empty_cache() -> None:
    """PyTorch's."""
    torch.cuda.empty_cache()


def get_and_print_gpu_memory(message: str, gpu_id: int = 0) -> int:
    """Bytes in use on a GPU, by whomever."""
    used = int(torch.cuda.device_memory_used(gpu_id))
    print(f"GPU {gpu_id}: {used / 2**30:.2f} GiB in use ({message})")
    return used
