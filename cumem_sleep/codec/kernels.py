"""What runs the codec on chunks of device memory: kernels on a GPU, the reference on the simulated driver."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import numpy.typing as npt

from .. import _core
from ..errors import CodecError, CumemSleepError
from ..streams import current_in_torch
from . import exponent as codec
from .exponent import CHUNK_BYTES, Code, Layout


class Kernels(Protocol):
    """The codec on the chunks of a table (`exponent.set_rows`); asynchronous, in the order of `stream`."""

    def count(self, stream: _core.CopyStream, layout: Layout, table: int, chunks: int) -> None:
        """Add the encoded size of each row's source to the word at its target."""

    def encode(self, stream: _core.CopyStream, layout: Layout, table: int, counters: int, chunks: int) -> None:
        """Encode each row's source to its target, which is zero; add the bytes without header to its counter."""

    def decode(self, stream: _core.CopyStream, layout: Layout, table: int, chunks: int) -> None:
        """Decode each row's source to its target."""

    def warm_up(self, layout: Layout, device: int) -> None:
        """Make all three ready."""


class GpuKernels(Kernels):
    """The kernels of `exponent_kernel`."""

    def __init__(self) -> None:
        import torch

        from . import exponent_kernel as codec_kernel

        if not torch.cuda.is_available():
            raise CodecError("PyTorch does not reach the GPU")
        self._kernels = codec_kernel

    def count(self, stream: _core.CopyStream, layout: Layout, table: int, chunks: int) -> None:  # noqa: D102
        with current_in_torch(stream):
            self._kernels.count(layout, table, chunks)

    def encode(  # noqa: D102
        self, stream: _core.CopyStream, layout: Layout, table: int, counters: int, chunks: int
    ) -> None:
        with current_in_torch(stream):
            self._kernels.encode(layout, table, counters, chunks)

    def decode(self, stream: _core.CopyStream, layout: Layout, table: int, chunks: int) -> None:  # noqa: D102
        with current_in_torch(stream):
            self._kernels.decode(layout, table, chunks)

    def warm_up(self, layout: Layout, device: int) -> None:  # noqa: D102
        self._kernels.warm_up(layout, device)


class SimulatedKernels(Kernels):
    """The reference, on the simulated driver, whose device memory the host can access."""

    def count(self, stream: _core.CopyStream, layout: Layout, table: int, chunks: int) -> None:  # noqa: D102
        for code, source, target, _ in self._rows(stream, layout, table, chunks):
            _words_at(target, 1)[0] += codec.chunk_bytes(code, _bytes_at(source, CHUNK_BYTES))[0]

    def encode(  # noqa: D102
        self, stream: _core.CopyStream, layout: Layout, table: int, counters: int, chunks: int
    ) -> None:
        found = _words_at(counters, chunks)
        for number, (code, source, target, nbytes) in enumerate(self._rows(stream, layout, table, chunks)):
            encoded = codec.encode(code, _bytes_at(source, CHUNK_BYTES))
            found[number] += encoded.size - layout.header_bytes
            _bytes_at(target, nbytes)[:] |= np.resize(encoded, nbytes)  # only where it is zero, as on the GPU

    def decode(self, stream: _core.CopyStream, layout: Layout, table: int, chunks: int) -> None:  # noqa: D102
        for code, source, target, nbytes in self._rows(stream, layout, table, chunks):
            _bytes_at(target, CHUNK_BYTES)[:] = codec.decode(code, _bytes_at(source, nbytes), np.array([nbytes]))

    def warm_up(self, layout: Layout, device: int) -> None:  # noqa: D102
        pass

    @staticmethod
    def _rows(
        stream: _core.CopyStream, layout: Layout, table: int, chunks: int
    ) -> Iterator[tuple[Code, int, int, int]]:
        stream.synchronize()
        rows = _bytes_at(table, codec.ROW_BYTES * chunks).view("<u8").reshape(-1, 4)
        for symbols, source, target, nbytes in codec.read_rows(rows):
            yield Code(layout, symbols), source, target, nbytes


def choose_kernels() -> Kernels:
    """The kernels for the driver that is open.

    Raises:
        CodecError: PyTorch does not reach the GPU.
        ImportError: PyTorch or Triton is missing.
    """
    return SimulatedKernels() if _core.driver_is_simulated() else GpuKernels()


@contextmanager
def codec_errors() -> Iterator[None]:
    """Turn any exception into a CodecError: Triton compiles at the first use, which may fail in countless ways."""
    try:
        yield
    except CumemSleepError:
        raise
    except Exception as error:
        raise CodecError(f"the codec's kernel failed: {error!r}") from error


def _bytes_at(address: int, nbytes: int) -> npt.NDArray[np.uint8]:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def _words_at(address: int, count: int) -> npt.NDArray[np.uint32]:
    return _bytes_at(address, 4 * count).view("<u4")
