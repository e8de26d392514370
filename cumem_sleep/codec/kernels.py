"""How kernels are launched; and what takes their place on the simulated driver."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from .. import _core
from ..errors import CodecError, CumemSleepError
from .codec import CHUNK_BYTES, PARAMETER_BYTES, ROW_BYTES, Bytes, Code, Codec, Kernels


@contextmanager
def codec_errors() -> Iterator[None]:
    """Turn any exception into a CodecError: Triton compiles at the first use, which may fail in countless ways."""
    try:
        yield
    except CumemSleepError:
        raise
    except Exception as error:
        raise CodecError(f"the codec's kernel failed: {error!r}") from error


@contextmanager
def launching(stream: _core.CopyStream) -> Iterator[None]:
    """Kernels launched inside run in the order of `stream`. Whatever they raise becomes a CodecError."""
    with codec_errors():
        if _core.driver_is_simulated():
            stream.synchronize()
            yield
            return
        import torch  # on its current stream Triton launches

        external = torch.cuda.ExternalStream(stream.handle, device=stream.device)  # type: ignore[no-untyped-call]
        # Set the device too: otherwise leaving the stream would create a context on the thread's device, if another.
        with torch.cuda.device(stream.device), torch.cuda.stream(external):
            yield


class SimulatedKernels(Kernels):
    """A codec's reference in place of its kernels, where the host can access device memory."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec

    def count(self, layout: Any, table: int, chunks: int) -> None:  # noqa: D102
        for code, source, target, _ in self._rows(layout, table, chunks):
            _at(target, 4).view("<u4")[0] += self._codec.chunk_bytes(code, _at(source, CHUNK_BYTES))[0]

    def encode(self, layout: Any, table: int, counters: int, chunks: int) -> None:  # noqa: D102
        counted = _at(counters, 4 * chunks).view("<u4")
        for number, (code, source, target, nbytes) in enumerate(self._rows(layout, table, chunks)):
            encoded = self._codec.encode(code, _at(source, CHUNK_BYTES))
            counted[number] += encoded.size - layout.header_bytes
            _at(target, nbytes)[:] |= np.resize(encoded, nbytes)  # only where it is zero, as on the GPU

    def decode(self, layout: Any, table: int, chunks: int) -> None:  # noqa: D102
        for code, source, target, nbytes in self._rows(layout, table, chunks):
            _at(target, CHUNK_BYTES)[:] = self._codec.decode(code, _at(source, nbytes), [nbytes])

    def warm_up(self, layout: Any, device: int) -> None:  # noqa: D102
        pass

    def _rows(self, layout: Any, table: int, chunks: int) -> Iterator[tuple[Code, int, int, int]]:
        """(code, source, target, encoded bytes) of each row."""
        for row in _at(table, ROW_BYTES * chunks).view("<u8").reshape(-1, ROW_BYTES // 8):
            code = Code(layout, row[2:].tobytes()[:PARAMETER_BYTES])
            yield code, int(row[0]), int(row[1]), int(row[3]) >> 32


def _at(address: int, nbytes: int) -> Bytes:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
