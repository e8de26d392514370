"""Every error this package raises. All derive from `CumemSleepError`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

MOST_BYTES = 2**63 - 1
MOST_ADDRESS = 2**64 - 1
_MOST_BITS_SHOWN = 128


def format_bytes(nbytes: int) -> str:
    """`nbytes` for people: exact below 1 KiB, otherwise in one binary unit ("1.50 GiB")."""
    if abs(nbytes) < 1024:
        return f"{nbytes} B"
    size, unit = nbytes / 1024, "KiB"
    for larger in ("MiB", "GiB", "TiB"):
        if abs(size) < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.2f} {unit}"


def counted(number: int, noun: str) -> str:
    """`1 segment`, `2 segments`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def shown(value: object) -> str:
    """`repr` of an argument, for a message; but of a huge number, which Python may refuse to write, only its size."""
    if isinstance(value, int) and value.bit_length() > _MOST_BITS_SHOWN:
        return f"a number of {value.bit_length()} bits"
    return repr(value)


class CumemSleepError(RuntimeError):
    """Base of all errors of this package (a RuntimeError, as vLLM's allocator raises).

    They can be pickled: a worker's error reaches the process that drives it unchanged.

    Attributes:
        asleep_segments: segments that are asleep although the sleep failed, because the driver also refused to undo it.
            The next `wake_up` brings them back with their bytes. Usually empty.
        lost_segments: the same, but dropped: their bytes are gone.
        rank: of this process, if it failed as one of several ranks, and all of them have undone their half.
    """

    asleep_segments: tuple[str, ...] = ()
    lost_segments: tuple[str, ...] = ()
    rank: int | None = None

    def __str__(self) -> str:
        asleep = f"asleep until the next wake_up: {', '.join(self.asleep_segments)}" if self.asleep_segments else ""
        lost = f"asleep, their bytes lost: {', '.join(self.lost_segments)}" if self.lost_segments else ""
        refused = asleep or lost
        of_rank = "" if self.rank is None else f"this was rank {self.rank}, and the other ranks did not go on"
        return _sentence(super().__str__(), of_rank, refused and "the driver refused to undo this", asleep, lost)

    def __reduce__(self) -> tuple[object, ...]:
        return _restored, (type(self), self.args, self.__dict__)


class InvalidState(CumemSleepError):
    """The call is not possible in the present state. Nothing was changed."""


class InvalidArgument(InvalidState, ValueError):
    """An argument has a value that no call accepts; the message names the value and what is allowed."""


class InvalidArgumentType(InvalidArgument, TypeError):
    """An argument has the wrong type; the message names the value and the expected type."""


class DriverError(CumemSleepError):
    """A driver call failed.

    Attributes:
        call: the CUDA name of the call, e.g. `cuMemMap` (`dlopen` if libcuda itself could not be opened).
        error: the CUDA name of the error, e.g. `CUDA_ERROR_INVALID_VALUE`.
        detail: CUDA's description of the error, or what to do about it.
        segment: the memory concerned (address, size, device, tag), or "".
    """

    def __init__(self, call: str, error: str, detail: str = "", segment: str = "") -> None:
        self.call = call
        self.error = error
        self.detail = detail
        self.segment = segment
        super().__init__(_sentence(f"{call} failed with {error}", segment and f"for {segment}", detail))


class OutOfDeviceMemory(DriverError):
    """The GPU has too little free memory.

    Attributes:
        needed_bytes: what the call needed.
        free_bytes: what the device had free.
    """

    def __init__(
        self, needed_bytes: int, free_bytes: int, device: int, call: str = "cuMemCreate", segment: str = ""
    ) -> None:
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes
        self.device = device
        super().__init__(
            call,
            "CUDA_ERROR_OUT_OF_MEMORY",
            f"device {device}: needed {format_bytes(needed_bytes)}, free {format_bytes(free_bytes)};"
            " free GPU memory, or put another process to sleep, then call again",
            segment,
        )


class OutOfHostMemory(CumemSleepError, MemoryError):
    """There is too little host memory for the backups.

    Raised before anything is changed, but for one case: a wake from level 3 raises it if the driver cannot pin the
    backups again. Then everything still sleeps, and the process is at level 1.

    Attributes:
        needed_bytes: what the backups need in addition to what they take already.
        available_bytes: what the limit leaves.
        limit: which limit refused: `budget`, `cgroup`, `MemAvailable`, `vault`, `vault_host` (the vault cannot take
            all of its memory now; `detail` says why), or the call that failed (`mmap`, `madvise`, `cuMemHostRegister`).
            RLIMIT_MEMLOCK is not checked: the NVIDIA driver does not enforce it (measured, 580).
    """

    ADVICE: ClassVar[Mapping[str, str]] = {
        "budget": "raise CUMEM_SLEEP_HOST_BUDGET_BYTES or sleep at level 2",
        "cgroup": "raise the container's memory limit or sleep at level 2",
        "MemAvailable": "free host memory or sleep at level 2",
        "cuMemHostRegister": "the driver cannot pin that much: free host memory or sleep at level 2",
        "vault": "wake or end another process, give the vault more --memory, or sleep at level 2",
        "vault_host": "mend what keeps the vault from taking all of its --memory, or sleep at level 2",
    }

    def __init__(self, needed_bytes: int, available_bytes: int, limit: str, detail: str = "") -> None:
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes
        self.limit = limit
        self.detail = detail
        super().__init__(
            _sentence(
                f"host memory for backups: needed {format_bytes(needed_bytes)},"
                f" available {format_bytes(available_bytes)} (limit: {limit})",
                detail,
                self.ADVICE.get(limit, ""),
            )
        )


class BackupMismatch(CumemSleepError):
    """Restored bytes differ from the bytes at sleep. Everything stays asleep; nothing is served.

    Attributes:
        segment: the memory concerned (address, size, device, tag).
        expected: the digest of the bytes at sleep, as 32 hexadecimal digits.
        actual: the digest of the restored bytes.
    """

    def __init__(self, segment: str, expected: str, actual: str) -> None:
        self.segment = segment
        self.expected = expected
        self.actual = actual
        super().__init__(
            f"restored bytes of {segment} have digest {actual}, at sleep it was {expected}:"
            " the backup, in host memory or a vault's file, or a copy is damaged; everything stays asleep. Wake again"
            " to retry the copy; if it fails again, the backup is lost: free that memory, or restart, and reload the"
            " weights"
        )


class AdoptionFailed(CumemSleepError):
    """Tensors were not filled with what was offered under a name. All of them hold NaN (0xFF) now, or anything if the
    driver refuses that, too, as `why` says then.

    Attributes:
        name: that it was offered under.
        why: what went wrong.
    """

    def __init__(self, name: str, why: str) -> None:
        self.name, self.why = name, why
        super().__init__(f"{name!r} was not adopted, and what its tensors held is lost: load them again ({why})")


class CodecError(CumemSleepError):
    """A compressed backup cannot be decoded here: everything stays asleep, with its backups."""


class CheckpointFailed(CumemSleepError):
    """The CUDA state of this process cannot be brought back to the GPU.

    Attributes:
        reason: what failed, in words.
        state: in which state CUDA says that the process is: `CHECKPOINTED`, `LOCKED` or `FAILED`.
        lost: whether no later try can succeed, so that the process has to be restarted.
    """

    def __init__(self, what: str, reason: str, state: str, lost: bool = False) -> None:
        self.reason = reason
        self.state = state
        self.lost = lost or state == "FAILED"
        is_whole = state in ("CHECKPOINTED", "LOCKED")
        advice = "nothing is lost: call wake_up again" if is_whole else "call wake_up again, or restart this process"
        if self.lost:
            advice = "CUDA cannot restore it any more: restart this process"
        super().__init__(
            f"this process did not come back from {what}: {reason}; CUDA reports its state as {state}: {advice}"
        )


class RankFailed(CumemSleepError):
    """Another rank of the engine failed, has ended, or did not answer in time: this one has undone its half.

    All ranks are as they were before the call. It can be made again, on all of them.

    Attributes:
        operation: `sleep`, `wake_up` or `discard`.
        failed_rank: which rank; this one, if it answered when the others had given up on it.
        reason: why, in words: its error, or what became of it.
        undecided: only over several hosts: this rank undid its half without knowing whether rank 0 went on. Call again.
    """

    def __init__(self, operation: str, failed_rank: int, ranks: int, reason: str, undecided: bool = False) -> None:
        self.operation = operation
        self.failed_rank = failed_rank
        self.reason = reason
        self.undecided = undecided
        super().__init__(
            f"{operation}: rank {failed_rank} of {ranks} {reason};"
            + (" this rank has undone its half" if undecided else " no rank went on, and all is as it was")
        )


class VaultError(CumemSleepError):
    """The vault cannot do what was asked, or is not set up correctly; the message says what to do."""


class VaultUnavailable(VaultError):
    """No vault of this user and version answers at that socket. Nothing was changed."""


class VaultLost(VaultError):
    """The vault has ended, has closed the connection, or does not answer in time.

    Backups that it keeps for this process can still be read.

    Attributes:
        may_go_on: the vault is still running and may yet carry out the request: it did not answer in time, or has cut
            this process off. So the connection must stay open, or the vault would release the backups; memory that the
            vault was asked to fill must not be used. The next operation uses the vault if it answers again by then.
    """

    def __init__(self, message: str, may_go_on: bool = False) -> None:
        self.may_go_on = may_go_on
        super().__init__(message)


def _restored(kind: type[CumemSleepError], arguments: tuple[object, ...], facts: dict[str, object]) -> CumemSleepError:
    error = kind.__new__(kind, *arguments)
    error.__dict__.update(facts)
    return error


def _sentence(*parts: str) -> str:
    return ": ".join(part for part in parts if part)


def check_integer(name: str, value: object, minimum: int, maximum: int = MOST_BYTES) -> None:
    """
    Raises:
        InvalidArgument: the argument called `name` is not a whole number, is below `minimum`, or above `maximum`.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidArgumentType(f"{name}={value!r}: expected a whole number")
    if value < minimum:
        raise InvalidArgument(f"{name}={shown(value)}: expected at least {minimum}")
    if value > maximum:
        raise InvalidArgument(f"{name}={shown(value)}: expected at most {maximum}")


def check_bool(name: str, value: object) -> None:
    """
    Raises:
        InvalidArgumentType: the argument called `name` is neither True nor False.
    """
    if not isinstance(value, bool):
        raise InvalidArgumentType(f"{name}={shown(value)}: expected True or False")
