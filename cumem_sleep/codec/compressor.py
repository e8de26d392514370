"""Whether backups are compressed. If they cannot be, compression is given up here.

`Workbench.begin_plan`, `Workbench.count_sampled` and `Count.finish` decide whether a single backup is.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from .. import _core, log
from ..errors import CodecError
from ..tuning import Tuning
from .codec import Layout
from .codecs import usual_layouts
from .runner import Runner, choose_runner, codec_errors
from .workbench import Workbench, workbench_bytes


class Compressor:
    """Whether and how segments are compressed, for one allocator."""

    def __init__(self, wanted: bool, tuning: Tuning) -> None:
        self._wanted = wanted
        self._tuning = tuning
        self._runner: Runner | None = None
        self._ready: set[tuple[Layout, int]] = set()

    @property
    def on(self) -> bool:
        """Whether backups should be compressed (known once the driver is open)."""
        if self._wanted and self._runner is None:
            try:
                self._runner = choose_runner()
            except Exception as error:
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
        if self.on and self._runner is not None:
            try:
                self._check(device)
                for layout in usual_layouts():
                    self._have_ready(layout, device)
            except CodecError as error:
                self.give_up(error)

    def _is_ready(self, layout: Layout, device: int) -> bool:
        """Whether its kernels run at once."""
        assert self._runner is not None
        return not self._runner.compiles or (layout, device) in self._ready

    def _have_ready(self, layout: Layout, device: int) -> None:
        """Compile, load and test the kernels, before anything is stored that only they can read.

        Raises:
            CodecError: they fail or give wrong results.
        """
        assert self._runner is not None
        if (layout, device) not in self._ready:
            begin = time.perf_counter()
            with codec_errors():
                self._runner.warm_up(layout, device)
            self._ready.add((layout, device))
            seconds = time.perf_counter() - begin
            log.debug("the kernels for %s are ready on device %d after %.2f s", layout.name, device, seconds)

    @staticmethod
    def _check(device: int) -> None:
        if not _core.device_info(device).host_pointers:
            raise CodecError(f"kernels of device {device} cannot access pinned host memory by its host address")

    def workbench(
        self,
        device: int,
        spare_bytes: int,
        lenders: Sequence[_core.Segment] = (),
        *,
        keep_bytes: bool = True,
        small: bool = False,
    ) -> Workbench:
        """Slots on `device`, for one operation; a context manager.

        Args:
            spare_bytes: how much device memory may be taken for them.
            lenders: segments whose memory may be used meanwhile if there is too little.
            keep_bytes: whether the lenders' bytes are put back at the end.
            small: take little memory and count few chunks at a time, because the model runs meanwhile; nobody waits, so
                kernels are compiled for any segment.

        Raises:
            CodecError: the kernels are not available, or cannot access the memory they need.
            DriverError, OutOfHostMemory: the driver refused.
        """
        if self._runner is None:
            try:
                self._runner = choose_runner()
            except Exception as error:
                raise CodecError(f"compressed backups cannot be read: {error}") from error
        self._check(device)
        if small:
            spare_bytes = min(
                spare_bytes, workbench_bytes(self._tuning, self._tuning.slots, self._tuning.slot_bytes[-1])
            )
        return Workbench(
            device,
            self._runner,
            self._tuning,
            spare_bytes,
            lenders,
            keep_bytes=keep_bytes,
            is_ready=self._is_ready,
            have_ready=self._have_ready,
            worth_compiling_bytes=0 if small else self._tuning.worth_compiling_bytes,
            count_rows=self._tuning.few_rows if small else self._tuning.rows,
        )
