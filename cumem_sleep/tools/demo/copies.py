"""Copies between the host and one device, double-buffered: one piece is copied while another is used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing

import numpy as np

from ... import _core
from ...core.pinned import pinned_block
from .. import layout
from ..layout import DevicePiece
from ..safetensors import TensorBytes


class DeviceCopies:
    """Copies between the host and one device, through two pinned buffers in turn."""

    def __init__(self, stack: ExitStack, device: int) -> None:
        self._blocks = [stack.enter_context(closing(pinned_block(layout.PIECE_BYTES, device))) for _ in range(2)]
        self._stream = stack.enter_context(_core.CopyStream(device))

    def write(self, pieces: Iterable[DevicePiece]) -> Iterator[int]:
        """Copy the tensors to the device; yields the bytes of tensors done so far."""
        done = 0
        for number, piece in enumerate(pieces):
            block = self._blocks[number % 2]  # the other one may still be in flight
            host = np.frombuffer(memoryview(block), np.uint8)
            for offset, tensor, start, nbytes in piece.parts:
                host[offset : offset + nbytes] = tensor.data[start : start + nbytes]
                done += nbytes
            self._stream.synchronize()
            self._stream.to_device(piece.address, block, 0, piece.nbytes)
            yield done
        self._stream.synchronize()

    def read(self, pieces: Iterable[DevicePiece]) -> Iterator[tuple[DevicePiece, TensorBytes]]:
        """The bytes of each piece; valid until the next one is requested."""
        before: tuple[DevicePiece, _core.HostBlock] | None = None
        for number, piece in enumerate(pieces):
            block = self._blocks[number % 2]
            self._stream.synchronize()
            self._stream.to_host(block, 0, piece.address, piece.nbytes)
            if before is not None:
                yield before[0], np.frombuffer(memoryview(before[1]), np.uint8)[: before[0].nbytes]
            before = piece, block
        self._stream.synchronize()
        if before is not None:
            yield before[0], np.frombuffer(memoryview(before[1]), np.uint8)[: before[0].nbytes]
