"""Tables that tell a kernel what to do with which chunk: a row for each, of 32 little-endian bytes.

A row is the source's address, the target's address, the code's parameters in 12 bytes, and the encoded bytes in 4.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from .codec import PARAMETER_BYTES, Bytes, Code

ROW_BYTES = 32


def parameters_of(codes: Sequence[Code]) -> Bytes:
    """The parameters of each code, of shape (codes, PARAMETER_BYTES)."""
    joined = b"".join(code.parameters.ljust(PARAMETER_BYTES, b"\0") for code in codes)
    return np.frombuffer(joined, np.uint8).reshape(-1, PARAMETER_BYTES)


def set_rows(
    table: npt.NDArray[np.uint64],
    parameters: Bytes,
    sources: npt.ArrayLike,
    targets: npt.ArrayLike,
    sizes: npt.ArrayLike,
) -> None:
    """Fill a table of shape (chunks, 4).

    Args:
        parameters: of codes, of shape (PARAMETER_BYTES,) for all chunks or (chunks, PARAMETER_BYTES).
        sizes: of the encoded chunks in bytes.
    """
    table[:, 0], table[:, 1] = sources, targets
    table[:, 2:].view(np.uint8)[:, :PARAMETER_BYTES] = parameters
    table.view("<u4")[:, 7] = sizes


def rows(
    code: Code, sources: npt.ArrayLike, targets: npt.ArrayLike, sizes: npt.ArrayLike = 0
) -> npt.NDArray[np.uint64]:
    """A new table for chunks of this code at these addresses, of these encoded sizes in bytes."""
    table = np.empty((np.size(sources), 4), np.uint64)
    set_rows(table, parameters_of([code]), sources, targets, sizes)
    return table


def read_rows(table: npt.NDArray[np.uint64]) -> Iterator[tuple[bytes, int, int, int]]:
    """(parameters, source, target, encoded bytes) of each row."""
    for row in table:
        yield row[2:].tobytes()[:PARAMETER_BYTES], int(row[0]), int(row[1]), int(row[3]) >> 32
