"""A relay: the link of one GPU carries pieces for another one, through staging memory on the first and peer to peer.

By copy engines alone: on the GPU that relays, no kernel runs. The other one copies between the two, so that it is the
staging memory that is shared, once. To share each segment that a client lent, with three peers, took the driver 0.7 ms,
and to take it back 0.6 ms: nearly as long as four links take to fill it (`vault_links_mapped_for_peers.txt`).
"""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import suppress

from .. import _core
from ..core import log
from ..errors import DriverError
from .jobs import RELAYED_BYTES, LinkPiece

SLOTS = 4  # of staging memory: as many pieces may be in flight
_LEFT_BYTES = 256 << 20  # of a GPU's memory; what is less is not taken for staging
_MOST_TRIALS = 12  # the first is not judged: the driver may set something up. Busy threads of the vault delay others
_LEAST_TIMED_BYTES = 4 << 20  # smaller pieces are not judged: their time is mostly latency
_WORTH = 2.0  # times the link's rate is the least that copies between the two GPUs must have
_AGAIN_S = 60.0  # until it is tried again where memory or the rate was too low


class Relaying:
    """Which GPUs may relay for which: those that the user names, and that reach the other one's memory."""

    def __init__(self, devices: Collection[int]) -> None:
        self._devices = frozenset(devices)
        self._reaches: dict[tuple[int, int], bool] = {}

    def refusal(self, device: int, target: int) -> str:
        """Why the link of `device` may not carry copies for the memory of `target`; "" if it may."""
        if device not in self._devices:
            return "--relay leaves it out"
        if (device, target) not in self._reaches:
            with suppress(DriverError):
                self._reaches[device, target] = _core.can_access_peer(target, device)
        return "" if self._reaches.get((device, target), False) else "the two GPUs are no peers"


class Relay:
    """The way over one GPU's link to the memory of others, in one direction. All calls belong to one thread."""

    def __init__(self, device: int, to_host: bool) -> None:
        self.device = device
        self._to_host = to_host
        self._staging: _core.Scratch | None = None
        self._reached_by: set[int] = set()  # GPUs that access it
        self._begun = 0  # copies; each uses the slot after that of the one before
        self._paused: dict[int, tuple[float, str]] = {}  # until when, and why, by the GPU whose memory it would reach
        self._trials: dict[int, list[tuple[float, float]]] = {}  # by that GPU: seconds of both ways, each time
        self._worth: set[int] = set()  # GPUs to whose memory it is fast enough
        self._said: set[str] = set()
        self._failure = ""

    @property
    def is_open(self) -> bool:
        """Whether it has staging memory."""
        return self._staging is not None

    def refusal(self, target: int) -> str:
        """Why it copies nothing for that GPU now; "" if it does."""
        if self._failure:
            return self._failure
        until, why = self._paused.get(target, (0.0, ""))
        return why if time.monotonic() < until else ""

    def disable(self, target: int, error: Exception) -> None:
        """Copy nothing any more, for nobody: a copy may still use the staging memory."""
        self._say(target, error)
        self._failure = _text(error)

    def is_on_trial(self, target: int) -> bool:
        """Whether its rate is not known yet: then `begin` waits for the copy, and nothing else may be in flight."""
        return target not in self._worth and len(self._trials.get(target, ())) < _MOST_TRIALS

    def pause(self, target: int, why: object) -> None:
        """Copy nothing for that GPU for a while."""
        self._say(target, why)
        self._paused[target] = time.monotonic() + _AGAIN_S, _text(why)
        self._trials.pop(target, None)
        self._worth.discard(target)

    def _say(self, target: int, why: object) -> None:
        """Once."""
        said = f"GPU {self.device} relays nothing {'from' if self._to_host else 'to'} GPU {target}: {_text(why)}"
        if said not in self._said:
            self._said.add(said)
            log.warning("%s", said)

    def open(self, target: int) -> bool:
        """Have staging memory that the GPU `target` reaches; nothing is in flight if that one is new.

        Returns: False where there is too little memory, or the driver refuses: then it pauses.
        """
        if self._staging is None or target not in self._reached_by:
            try:
                self.close()
                free_bytes, _ = _core.memory_info(self.device)
                if free_bytes < SLOTS * RELAYED_BYTES + _LEFT_BYTES:
                    self.pause(target, "it has too little memory left")
                    return False
                self._staging = _core.Scratch(self.device, SLOTS * RELAYED_BYTES, list({*self._reached_by, target}))
                self._reached_by.add(target)
            except Exception as error:  # whatever it is: the thread goes on without
                self.pause(target, error)
                return False
        return True

    def close(self) -> None:
        """Give the staging memory back; nothing is in flight."""
        if self._staging is not None:
            self._staging.close()
            self._staging = None

    def begin(self, link: _core.CopyStream, peer: _core.CopyStream, piece: LinkPiece, address: int) -> None:
        """Begin to copy the piece from or to `address`, in memory of the GPU of `peer`.

        Args:
            link: a stream of this GPU; when the copies on both have ended, the piece is copied.

        Raises:
            DriverError: a part of it may be in flight.
        """
        assert self._staging is not None
        staging = self._staging.address + self._begun % SLOTS * RELAYED_BYTES
        self._begun += 1
        first, second = (peer, link) if self._to_host else (link, peer)
        times = [time.perf_counter()]
        for stream in (first, second):
            if stream is peer:
                to, from_ = (staging, address) if self._to_host else (address, staging)
                peer.within_devices(to, from_, piece.nbytes)
            elif self._to_host:
                link.to_host(piece.block, piece.offset, staging, piece.nbytes)
            else:
                link.to_device(staging, piece.block, piece.offset, piece.nbytes)
            if self.is_on_trial(peer.device):
                stream.synchronize()
                times.append(time.perf_counter())
            elif stream is first:
                second.follow(first)
        if self.is_on_trial(peer.device):
            steps = times[1] - times[0], times[2] - times[1]
            self._judge(peer.device, piece.nbytes, *(steps if self._to_host else steps[::-1]))

    def _judge(self, target: int, nbytes: int, peer_s: float, link_s: float) -> None:
        """A piece has taken so long between the GPUs, and so long over the link."""
        if nbytes < _LEAST_TIMED_BYTES:
            return
        trials = self._trials.setdefault(target, [])
        trials.append((peer_s, link_s))
        if len(trials) == 1:
            return
        peer_s, link_s = (min(seconds) for seconds in zip(*trials[1:], strict=True))
        if peer_s * _WORTH <= link_s:
            self._worth.add(target)
        elif len(trials) >= _MOST_TRIALS:
            self.pause(target, "copies between them are slow, as without NVLink")


def _text(why: object) -> str:
    """Never empty: that would mean that there is no reason."""
    return str(why) or type(why).__name__
