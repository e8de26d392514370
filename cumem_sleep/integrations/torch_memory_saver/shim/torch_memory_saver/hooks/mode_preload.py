"""Where torch_memory_saver defines `configure_subprocess`."""

from collections.abc import Iterator
from contextlib import contextmanager

from cumem_sleep.integrations.torch_memory_saver.environment import configure_subprocess as with_library

from ..utils import get_binary_path_from_package

__all__ = ["configure_subprocess"]


@contextmanager
def configure_subprocess() -> Iterator[None]:
    """As that of the package; the library is the one that this module's `get_binary_path_from_package` gives."""
    with with_library(get_binary_path_from_package("torch_memory_saver_hook_mode_preload")):
        yield
