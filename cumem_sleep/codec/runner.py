"""What runs codecs on chunks of device memory: kernels on a GPU, the reference on the simulated driver."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import numpy.typing as npt

from .. import _core
from ..errors import CodecError, CumemSleepError
from .codec import CHUNK_BYTES, Code, Layout
from .codecs import CODECS, codec_of
from .streams import current_in_torch
from .table import ROW_BYTES, read_rows


class Runner(Protocol):
    """`codec.Kernels` of all codecs; asynchronous, in the order of `stream`.

    Attributes:
        compiles: the first use of a layout takes a second or two.
    """

    compiles: bool

    def count(self, stream: _core.CopyStream, layout: Layout, table: int, chunks: int) -> None:
        """As `Kernels.count`."""

    def encode(self, stream: _core.CopyStream, layout: Layout, table: int, counters: int, chunks: int) -> None:
        """As `Kernels.encode`."""

    def decode(self, stream: _core.CopyStream, layout: Layout, table: int, chunks: int) -> None:
        """As `Kernels.decode`."""

    def warm_up(self, layout: Layout, device: int) -> None:
        """Make all three ready."""


class GpuRunner(Runner):
    """By the kernels of each codec."""

    compiles = True

    def __init__(self) -> None:
        import torch

        if not torch.cuda.is_available():
            raise CodecError("PyTorch does not reach the GPU")
        self._kernels = {layout: listed.import_kernels() for listed in CODECS for layout in listed.codec.LAYOUTS}

    def count(self, stream: _core.CopyStream, layout: Layout, table: int, chunks: int) -> None:  # noqa: D102
        with current_in_torch(stream):
            self._kernels[layout].count(layout, table, chunks)

    def encode(  # noqa: D102
        self, stream: _core.CopyStream, layout: Layout, table: int, counters: int, chunks: int
    ) -> None:
        with current_in_torch(stream):
            self._kernels[layout].encode(layout, table, counters, chunks)

    def decode(self, stream: _core.CopyStream, layout: Layout, table: int, chunks: int) -> None:  # noqa: D102
        with current_in_torch(stream):
            self._kernels[layout].decode(layout, table, chunks)

    def warm_up(self, layout: Layout, device: int) -> None:  # noqa: D102
        self._kernels[layout].warm_up(layout, device)


class SimulatedRunner(Runner):
    """By the reference of each codec, on the simulated driver, whose device memory the host can access."""

    compiles = False

    def count(self, stream: _core.CopyStream, layout: Layout, table: int, chunks: int) -> None:  # noqa: D102
        for code, source, target, _ in self._rows(stream, layout, table, chunks):
            _words_at(target, 1)[0] += codec_of(layout).chunk_bytes(code, _bytes_at(source, CHUNK_BYTES))[0]

    def encode(  # noqa: D102
        self, stream: _core.CopyStream, layout: Layout, table: int, counters: int, chunks: int
    ) -> None:
        found = _words_at(counters, chunks)
        for number, (code, source, target, nbytes) in enumerate(self._rows(stream, layout, table, chunks)):
            encoded = codec_of(layout).encode(code, _bytes_at(source, CHUNK_BYTES))
            found[number] += encoded.size - layout.header_bytes
            _bytes_at(target, nbytes)[:] |= np.resize(encoded, nbytes)  # only where it is zero, as on the GPU

    def decode(self, stream: _core.CopyStream, layout: Layout, table: int, chunks: int) -> None:  # noqa: D102
        for code, source, target, nbytes in self._rows(stream, layout, table, chunks):
            stored = _bytes_at(source, nbytes)
            _bytes_at(target, CHUNK_BYTES)[:] = codec_of(layout).decode(code, stored, np.array([nbytes]))

    def warm_up(self, layout: Layout, device: int) -> None:  # noqa: D102
        pass

    @staticmethod
    def _rows(
        stream: _core.CopyStream, layout: Layout, table: int, chunks: int
    ) -> Iterator[tuple[Code, int, int, int]]:
        stream.synchronize()
        rows = _bytes_at(table, ROW_BYTES * chunks).view("<u8").reshape(-1, 4)
        for parameters, source, target, nbytes in read_rows(rows):
            yield codec_of(layout).code_of(layout, parameters), source, target, nbytes


def choose_runner() -> Runner:
    """The one for the driver that is open.

    Raises:
        CodecError: PyTorch does not reach the GPU.
        ImportError: PyTorch or Triton is missing.
    """
    return SimulatedRunner() if _core.driver_is_simulated() else GpuRunner()


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
