"""What others import from torch_memory_saver's module of this name."""

from pathlib import Path

from cumem_sleep.core.preload import library_path
from cumem_sleep.integrations.torch_memory_saver.environment import changed as change_env

__all__ = ["change_env", "get_binary_path_from_package", "is_xpu"]


def get_binary_path_from_package(stem: str) -> Path:
    """The library for LD_PRELOAD: the only one there is, since PyTorch finds the hooks of its mode `torch` by itself.

    Raises:
        RuntimeError: another one is asked for.
    """
    path = library_path()
    if stem != path.name.partition(".")[0]:
        raise RuntimeError(f"{stem}: cumem-sleep has no such library, only {path}")
    return path


def is_xpu() -> bool:
    """False: this layer is for CUDA."""
    return False
