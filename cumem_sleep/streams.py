"""A stream of this layer as PyTorch's current one: there Triton launches kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from . import _core


@contextmanager
def current_in_torch(stream: _core.CopyStream) -> Iterator[None]:
    """`stream` is PyTorch's current stream inside."""
    import torch

    external = torch.cuda.ExternalStream(stream.handle, device=stream.device)  # type: ignore[no-untyped-call]
    # With the device, else leaving the stream creates a context on the thread's own device, which may be another.
    with torch.cuda.device(stream.device), torch.cuda.stream(external):
        yield
