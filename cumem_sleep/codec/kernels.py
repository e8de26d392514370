"""How kernels are launched and tried; and what takes their place on the simulated driver."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import numpy as np

from .. import _core
from ..core.pinned import pinned_block
from ..errors import CodecError, CumemSleepError
from .codec import CHUNK_BYTES, PARAMETER_BYTES, ROW_BYTES, Bytes, Code, Codec, Kernels, Layout, parameters_of, rows


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


def try_kernels(codec: Codec, kernels: Kernels, layout: Layout, device: int) -> None:
    """Compile and load them, and compare them with the reference before anything depends on them.

    Meanwhile they read and write only a little pinned host memory.

    Raises:
        CodecError: they fail, or give other results.
    """
    if isinstance(kernels, SimulatedKernels):
        return  # they are the reference
    # Few bits are set: some values are frequent, and others are not.
    content = np.bitwise_and.reduce(np.random.default_rng(0).integers(0, 256, (3, CHUNK_BYTES), np.uint8))
    (parameters,), _ = codec.rank(layout, content[None, :8192])
    code = Code(layout, parameters.astype(np.uint8).tobytes())
    (size,) = codec.chunk_bytes(code, content).tolist()
    # In the block: the content, what is decoded, two counters, the tables, what is encoded.
    counters_at, tables_at, encoded_at = 2 * CHUNK_BYTES, 2 * CHUNK_BYTES + 32, 2 * CHUNK_BYTES + 32 + 3 * ROW_BYTES
    # The stream is closed first: whatever happens, nothing runs when the block is freed.
    with closing(pinned_block(encoded_at + size, device)) as block, _core.CopyStream(device) as stream:
        memory, at = np.frombuffer(memoryview(block), np.uint8), block.address
        memory[:] = 0
        memory[:CHUNK_BYTES] = content
        sources, targets = [0, 0, encoded_at], [counters_at + 16, encoded_at, CHUNK_BYTES]
        table = rows(parameters_of([code]), np.add(sources, at), np.add(targets, at), size)
        memory[tables_at:encoded_at] = table.reshape(-1).view(np.uint8)
        with launching(stream):
            kernels.count(layout, at + tables_at, 1)
            kernels.encode(layout, at + tables_at + ROW_BYTES, at + counters_at, 1)
            kernels.decode(layout, at + tables_at + 2 * ROW_BYTES, 1)
            stream.synchronize()
        taken, counted = memory[counters_at:tables_at].view(np.uint32)[[0, 4]]
        same = np.array_equal(memory[CHUNK_BYTES:counters_at], content)
        if not same or counted != size or taken + layout.header_bytes != size:
            raise CodecError(f"the kernels for {layout.name} give wrong results on device {device}")


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

    def _rows(self, layout: Any, table: int, chunks: int) -> Iterator[tuple[Code, int, int, int]]:
        """(code, source, target, encoded bytes) of each row."""
        for row in _at(table, ROW_BYTES * chunks).view("<u8").reshape(-1, ROW_BYTES // 8):
            code = Code(layout, row[2:].tobytes()[:PARAMETER_BYTES])
            yield code, int(row[0]), int(row[1]), int(row[3]) >> 32


def _at(address: int, nbytes: int) -> Bytes:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
