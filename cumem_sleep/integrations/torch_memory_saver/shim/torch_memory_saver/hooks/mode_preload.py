"""Where torch_memory_saver defines `configure_subprocess`."""

from cumem_sleep.integrations.torch_memory_saver import configure_subprocess

__all__ = ["configure_subprocess"]
