"""How tensors are packed into segments, and segments cut into pieces."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import MIB

from cumem_sleep.tools import layout
from cumem_sleep.tools.safetensors import Tensor


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small tensors are cut into several, as large ones are."""
    monkeypatch.setattr(layout, "PIECE_BYTES", MIB)


@given(st.lists(st.integers(0, 30 * MIB), max_size=40))
@settings(max_examples=40, deadline=None)
def test_layout(sizes: list[int]) -> None:
    tensors = [
        Tensor(str(number), "U8", (size,), np.broadcast_to(np.uint8(0), (size,))) for number, size in enumerate(sizes)
    ]
    segments = layout.lay_out(tensors)
    placed = [tensor.name for segment in segments for _, tensor in segment.tensors]
    assert sorted(placed) == sorted(tensor.name for tensor in tensors if tensor.data.size)
    for segment in segments:
        end = 0
        for offset, tensor in segment.tensors:
            assert offset >= end
            assert offset % 512 == 0
            end = offset + tensor.data.size
        assert end <= segment.nbytes
        assert len(segment.tensors) == 1 or segment.nbytes <= 20 * MIB
        covered = {tensor.name: 0 for _, tensor in segment.tensors}
        for piece in segment.pieces():
            for offset, tensor, start, nbytes in piece.parts:
                assert start == covered[tensor.name]
                assert offset + nbytes <= piece.nbytes
                covered[tensor.name] += nbytes
        assert covered == {tensor.name: tensor.data.size for _, tensor in segment.tensors}
