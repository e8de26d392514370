"""All of the vault's memory: taken in the background, and never more than it may have."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from .. import _core
from ..core.commitment import HOST_RESERVE_BYTES, Commitment, require_room
from ..errors import CumemSleepError, InvalidArgument, OutOfHostMemory, VaultError, format_bytes
from . import memory
from .files import SpillFile
from .ledger import Ledger
from .slabs import UNIT_BYTES

DEFAULT_SLAB_BYTES = 1 << 30
MAX_SLABS = 200  # owners have a descriptor of each that they have bytes in
_FILES_OF_SLAB = 2  # descriptors that the vault has of each slab; half of all that it may have are for other things
_ALIGNMENT = 2 << 20  # a huge page
_RESERVE_SHARE = 32  # of its memory a small vault leaves the host, so a container's limit of 5 % more is enough


@dataclass(frozen=True)
class VaultHost:
    """What the vault may use of its host.

    Attributes:
        threads: that prefault new memory.
        say: shows a line to the operator of the vault.
        reserved_huge_pages: use those, as long as there are some, before other memory.
        try_again_s: how long after it had too little memory for a slab it is asked again.
    """

    threads: int
    say: Callable[[str], None]
    reserved_huge_pages: bool = False
    try_again_s: float = 5.0


class VaultPool:
    """Slabs, and the ledger of what lies in them. Its calls belong to one thread; another takes memory.

    Attributes:
        slabs: by number.
        is_stopped: no more memory is taken, since the vault is about to end.
        short: why no more memory is being taken, or "".
        waits: until other processes have touched what they have committed, for up to a minute, so nobody knows when the
            next slab comes.
        prefaulted_bytes: of the slab that is being taken, whose pages are there.
    """

    def __init__(
        self,
        memory_bytes: int,
        slab_bytes: int | None,
        device: int,
        nodes: Sequence[int],
        host: VaultHost,
        post: Callable[[Callable[[], None]], None],
        changed: Callable[[], None],
        file: SpillFile | None = None,
    ) -> None:
        """Nothing is taken yet.

        Args:
            device: the GPU whose context registers the memory.
            nodes: NUMA nodes to take it from, in turn.
            post: has work done by the thread that calls the pool.
            changed: is called when there is more memory, or there will be no more.
            file: to spill to, if there is one.

        Raises:
            InvalidArgument: there is too little for one slab.
        """
        self.memory_bytes = memory_bytes // _ALIGNMENT * _ALIGNMENT
        if not self.memory_bytes:
            raise InvalidArgument(f"memory={memory_bytes}: expected at least {_ALIGNMENT} bytes")
        most_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most_slabs = max(1, min(MAX_SLABS, most_files // (2 * _FILES_OF_SLAB)))
        least = _aligned_up(-(-self.memory_bytes // most_slabs))
        self._slab_bytes = max(least, _aligned_up(slab_bytes or DEFAULT_SLAB_BYTES))
        # What sleepers hold of a vault before this one is not in `memory_bytes`, so that alone does not save the host.
        self._reserve_bytes = min(HOST_RESERVE_BYTES, self.memory_bytes // _RESERVE_SHARE)
        self._device, self._nodes, self._host, self._post, self._changed = device, nodes, host, post, changed
        self.ledger = Ledger() if file is None else Ledger(file.nbytes, file.freed)
        self.short = ""
        self.prefaulted_bytes = 0
        self.slabs: dict[int, memory.Slab] = {}
        self._last_slab = 0
        self._taker = ThreadPoolExecutor(1, "vault-memory")
        self._is_taking = self.is_stopped = self.waits = False
        self._try_again = 0.0  # when, while the host has too little
        self._reserved_are_left = host.reserved_huge_pages
        self._tenths_said = 0

    def out_of_memory(
        self, needed_bytes: int, available: int, names: Mapping[Hashable, str], of_files: str = ""
    ) -> OutOfHostMemory:
        """That so much cannot be had, neither now nor when all memory is taken. `names`: what it calls the owners."""
        holders = self.ledger.who_holds(names) + (f"; {of_files}" if of_files else "")
        missing = self.memory_bytes - self.ledger.memory.nbytes
        if self.short and needed_bytes <= available + missing:
            why = f"{holders}; the vault has {self._of_all()}, and cannot take more now: {self.short}"
            return OutOfHostMemory(needed_bytes, available, "vault_host", why)
        return OutOfHostMemory(needed_bytes, available, "vault", holders)

    def bytes_to_come(self) -> int:
        """Of memory that is still being taken."""
        if self.short or self.is_stopped:
            return 0
        return max(0, self.memory_bytes - self.ledger.memory.nbytes) // _ALIGNMENT * _ALIGNMENT

    def finish(self) -> None:
        """Take no more memory, and wait for what is being done; what comes of it is still posted."""
        self.is_stopped = True
        self._taker.shutdown()

    def close(self) -> None:
        """Unmap everything, after `finish`. Who has a descriptor of a slab reads it on."""
        for slab in self.slabs.values():
            slab.close()

    def try_again(self, now: float) -> None:
        """What was refused some time ago: memory by the host, and by the driver to take some back."""
        if self.short and now >= self._try_again:
            self.take_more()
        self._taker.submit(_core.reclaim)

    def take_more(self) -> None:
        """Begin with the next slab, if there is to be one."""
        self.short = ""
        nbytes = min(self._slab_bytes, self.bytes_to_come())
        if self._is_taking or not nbytes:
            return
        self._is_taking = True
        node = self._nodes[self._last_slab % len(self._nodes)]
        future = self._taker.submit(self._take, nbytes, node)
        future.add_done_callback(lambda future: self._post(partial(self._taken, future, node)))

    def _take(self, nbytes: int, node: int) -> memory.Slab:
        take = partial(memory.take, nbytes, node, self._device, self._host.threads)
        if self._reserved_are_left:
            try:
                return take(self._prefaulted, reserved_huge_pages=True)  # these are in no limit of the rest
            except CumemSleepError as error:
                self._reserved_are_left, self.prefaulted_bytes = False, 0
                self._host.say(
                    f"takes other memory from here on, since no slab of reserved huge pages is left: {error}"
                )
        commitment = Commitment()

        def prefaulted(size: int) -> None:
            self._prefaulted(size)
            commitment.set(commitment.bytes - size)
            if commitment.bytes:
                require_room(commitment.bytes + self._reserve_bytes)

        commitment.take(nbytes, partial(require_room, nbytes + self._reserve_bytes), self._before_wait)
        try:
            return take(prefaulted)
        finally:
            commitment.set(0)

    def _before_wait(self) -> None:
        if self.is_stopped:
            raise VaultError("the vault ends")
        if not self.waits:
            self.waits = True
            self._post(self._changed)

    def _prefaulted(self, nbytes: int) -> None:
        self.prefaulted_bytes += nbytes

    def _taken(self, future: Future[memory.Slab], node: int) -> None:
        self._is_taking = self.waits = False
        self.prefaulted_bytes = 0
        try:
            slab = future.result()
        except Exception as error:  # whatever it is, what is there can be used
            if not self._try_again:
                self._host.say(f"has {self._of_all()}, and cannot take more now: {error}")
            self.short, self._try_again = str(error), time.monotonic() + self._host.try_again_s
            self._changed()
            return
        self._try_again = 0.0
        self._last_slab += 1
        self.slabs[self._last_slab] = slab
        self.ledger.memory.add(self._last_slab, slab.nbytes, node)
        tenths = self.ledger.memory.nbytes * 10 // self.memory_bytes
        if tenths > self._tenths_said:
            self._tenths_said = tenths
            self._host.say(f"has {self._of_all()}")
        self.take_more()
        self._changed()

    def _of_all(self) -> str:
        return f"{format_bytes(self.ledger.memory.nbytes)} of {format_bytes(self.memory_bytes)}"


def _aligned_up(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


assert _ALIGNMENT % UNIT_BYTES == 0
