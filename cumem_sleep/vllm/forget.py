"""A worker forgets the backups of what sleeps at level 1: from then on it sleeps as at level 2.

Before level 2 vLLM's worker copies what no loader writes again: buffers, and the parameters that it was told to keep.
Here these copies come from the backups. The worker's own wake puts them back.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

from .. import _core
from ..allocator import CuMemAllocator
from . import loaded

# The worker's attributes, which differ by version, for its models as `loaded.models` calls them.
_BUFFERS = {"": "_sleep_saved_buffers", "draft.": "_sleep_saved_draft_buffers"}
_PARAMETERS = "_sleep_saved_parameters"
_REBUILDS_DRAFT = "_sleep_rebuild_draft_metadata_buffers"  # 0.26


def forget(worker: Any, tags: Any = None) -> int:
    """As `CuMemAllocator.forget`, which checks `tags`."""
    allocator = CuMemAllocator.get_instance()
    with allocator.call_of_ranks("forget"):
        copies = _copies(worker, allocator)
    nbytes = allocator.forget(tags)
    if copies and not _backed_up():
        for name, copied in copies.items():
            if hasattr(worker, name):
                setattr(worker, name, copied)
    return nbytes


def _backed_up() -> list[_core.Segment]:
    return [s for s in _core.segments() if s.tag == "weights" and s.sleep == _core.Segment.Sleep.BACKED_UP]


def _copies(worker: Any, allocator: CuMemAllocator) -> dict[str, Any]:
    """What the worker's attributes would be after level 2; {}: its weights do not sleep with backups."""
    places = [(segment.address, segment.address + segment.bytes) for segment in _backed_up()]
    if not places:
        return {}

    def copied(tensors: Mapping[str, Any]) -> dict[str, Any]:
        lost = {name: each for name, each in tensors.items() if any(a <= each.data_ptr() < b for a, b in places)}
        return {name: _copy_of(each, allocator) for name, each in lost.items() if each.numel()}

    copies: dict[str, Any] = {}
    for prefix, model in loaded.models(worker):
        copies[_BUFFERS[prefix]] = copied(dict(model.named_buffers()))
        if prefix:
            copies[_REBUILDS_DRAFT] = hasattr(getattr(model, "model", None), "_build_fused_kv_buffers")
        elif patterns := getattr(worker.vllm_config.model_config, "sleep_preserve_parameter_names", None):
            parameters = worker._get_sleep_parameters(model)  # the draft model's as well
            names = {name for pattern in patterns for name in fnmatch.filter(parameters, pattern)}
            copies[_PARAMETERS] = copied({name: each.detach() for name, each in parameters.items() if name in names})
    return copies


def _copy_of(tensor: Any, allocator: CuMemAllocator) -> Any:
    """Its bytes at its sleep, in host memory. It may have gaps."""
    import torch

    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    content = allocator.read_backup(tensor.data_ptr(), elements * tensor.element_size())
    return torch.from_numpy(content).view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
