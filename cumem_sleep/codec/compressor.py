"""Whether backups are compressed. If they cannot be, compression is given up here.

`plan.Plan` decides whether a single backup is.
"""

from __future__ import annotations

from ..core import log
from ..core.tuning import Tuning
from ..errors import CodecError
from .codec import Layout
from .codecs import make_ready, require_kernels, usual_layouts
from .workspace import Workspace


class Compressor:
    """Whether and how segments are compressed, for one allocator."""

    def __init__(self, wanted: bool, tuning: Tuning) -> None:
        self._wanted = wanted
        self._tuning = tuning
        self._ready: set[tuple[Layout, int]] = set()  # kernels, by device: elsewhere the first use takes seconds

    @property
    def on(self) -> bool:
        """Whether backups should be compressed (known once the driver is open)."""
        if self._wanted:
            try:
                require_kernels()
            except CodecError as error:
                self.give_up(error)
        return self._wanted

    def give_up(self, reason: object) -> None:
        """Make no more compressed backups, and log why. Existing ones can still be restored."""
        if self._wanted:
            log.warning(
                "backups are stored uncompressed from now on: %s; CUMEM_SLEEP_COMPRESS=off silences this warning",
                reason,
            )
        self._wanted = False

    def warm_up(self, device: int) -> None:
        """Compile and load what usual weights need, rather than during the first sleep."""
        if self.on:
            try:
                for layout in usual_layouts():
                    make_ready(self._ready, layout, device)
            except CodecError as error:
                self.give_up(error)

    def workspace(
        self,
        device: int,
        spare_bytes: int,
        *,
        small: bool = False,
    ) -> Workspace:
        """Slots on `device`, for one operation; a context manager.

        Args:
            spare_bytes: how much device memory may be taken for them.
            small: take little memory and count few chunks at a time, because the model runs meanwhile; nobody waits, so
                kernels are compiled for any segment.

        Raises:
            CodecError: the kernels are not available.
            DriverError, OutOfHostMemory: the driver refused.
        """
        require_kernels()
        return Workspace(device, self._tuning, spare_bytes, self._ready, small=small)
