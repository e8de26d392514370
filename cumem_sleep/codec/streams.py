"""Makes a stream of this layer PyTorch's current one, which is where Triton launches kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .. import _core


@contextmanager
def current_in_torch(stream: _core.CopyStream) -> Iterator[None]:
    """Make `stream` PyTorch's current stream inside the context."""
    import torch

    external = torch.cuda.ExternalStream(stream.handle, device=stream.device)  # type: ignore[no-untyped-call]
    # Set the device too: otherwise leaving the stream would create a context on the thread's device, if it is another.
    with torch.cuda.device(stream.device), torch.cuda.stream(external):
        yield
