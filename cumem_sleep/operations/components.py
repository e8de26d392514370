"""What every operation uses, and steps that several of them share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .. import _core
from ..backups.memory import BackupStore
from ..backups.ranges import Spans
from ..codec.compressor import Compressor
from ..core.tuning import Tuning
from ..digest.digester import DeviceDigester
from ..errors import DriverError, InvalidState
from ..settings import Settings
from ..store.copier import CopyChoosers

Fill = Callable[[Sequence[tuple[_core.Segment, Spans]]], None]

_CAPTURE_ERRORS = "CUDA_ERROR_STREAM_CAPTURE_"


@dataclass(frozen=True)
class Components:
    """The parts of one allocator that its operations use."""

    settings: Settings
    tuning: Tuning
    store: BackupStore
    digester: DeviceDigester
    compressor: Compressor
    choosers: CopyChoosers
    # Called at a wake with the segments that come back without some of their bytes, and which these are, before anybody
    # else may use them.
    fills: list[Fill] = field(default_factory=list)
    _warm_devices: set[int] = field(default_factory=set)

    @property
    def prover(self) -> DeviceDigester | None:
        """What makes the digests that a wake compares; None: it compares none."""
        return self.digester if self.settings.verify == "wake" else None

    def warm_up(self) -> None:
        """Compile or load what the first sleep and wake would otherwise wait for, once for each device."""
        for device in {segment.device for segment in _core.segments()} - self._warm_devices:
            with _core.CurrentContext(), _core.RelaxedCapture():
                if self.settings.verify == "wake" or self.settings.retain_backups:
                    self.digester.warm_up(device)
                if not _core.driver_is_simulated():  # which copies the same in both ways
                    self.choosers.warm_up(device)
                self.compressor.warm_up(device)
            self._warm_devices.add(device)


def quiesce(segments: Sequence[_core.Segment]) -> None:
    """Wait for the work that runs on the devices of `segments`.

    Raises:
        InvalidState: a CUDA graph is being captured on one of them.
        DriverError: the driver refused.
    """
    for device in sorted({segment.device for segment in segments}):
        try:
            _core.synchronize(device)
            _core.release_waiter(device)
        except DriverError as error:
            if error.error.startswith(_CAPTURE_ERRORS):
                raise InvalidState(
                    f"a CUDA graph is being captured on device {device} ({error.error}): its memory cannot sleep"
                    " now. That capture is now invalid: capture again"
                ) from error
            raise
