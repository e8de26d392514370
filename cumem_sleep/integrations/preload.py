"""Where `library_path` was before, for one release more: it is in `cumem_sleep.core.preload`."""

from ..core.preload import library_path

__all__ = ["library_path"]
