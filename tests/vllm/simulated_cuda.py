"""vLLM's platform for a machine without a GPU, as a platform plugin of vLLM: child processes find it, too.

Without NVML vLLM would find no platform at all. PyTorch is told the same, since vLLM's modules ask it while they are
imported.
"""

from __future__ import annotations

import torch
from vllm.platforms.cuda import NonNvmlCudaPlatform
from vllm.platforms.interface import DeviceCapability

ENTRY_POINT = "[vllm.platform_plugins]\nsimulated_cuda = simulated_cuda:platform\n"
METADATA = "Metadata-Version: 2.1\nName: simulated-cuda\nVersion: 0\n"


def platform() -> str:
    """What vLLM's entry point asks for: the name of a class."""
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    return f"{__name__}.{SimulatedCudaPlatform.__name__}"


class SimulatedCudaPlatform(NonNvmlCudaPlatform):  # type: ignore[misc]
    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
        return DeviceCapability(9, 0)

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return "Simulated GPU"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return 1 << 30

    @classmethod
    def set_device(cls, device: object) -> None:
        """PyTorch knows of none."""
