"""What vLLM's workers are given on top (`--worker-extension-cls`), so that a benchmark can write to their weights."""

from __future__ import annotations

from typing import Any

STANDARD_DEVIATION = 0.02


class Extension:
    """Its methods become methods of vLLM's worker."""

    model_runner: Any

    def fill_with_normal_values(self) -> int:
        """Normally distributed matrices, as trained ones nearly are: vLLM's dummy weights are uniform.

        Backups are made anew after it. Returns the bytes that were written.
        """
        import torch

        from cumem_sleep import CuMemAllocator

        written = 0
        for parameter in self.model_runner.model.parameters():
            if parameter.is_floating_point() and parameter.dim() > 1:
                parameter.data.normal_(std=STANDARD_DEVIATION)
                written += parameter.nbytes
        torch.cuda.synchronize()
        CuMemAllocator.get_instance().prepare()
        return written
