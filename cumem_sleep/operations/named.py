"""Tensors that outlive their process: the vault keeps their segments' backups under a name, and others adopt them.

Nothing is held twice: what is kept are the same entries as a sleep's, and a manifest that says where in them each
tensor lies, and which digest it had. Who adopts them may have them elsewhere, and proves them by these digests.
"""

from __future__ import annotations

import json
import zlib
from base64 import b64decode, b64encode
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from hashlib import sha256
from itertools import groupby, pairwise
from typing import NamedTuple, cast

from .. import _core
from ..backups.vault_tier import VaultTier
from ..core.extents import Extent, Lane
from ..core.segments import by_device
from ..digest.digester import DeviceDigester
from ..errors import (
    MOST_ADDRESS,
    AdoptionFailed,
    DriverError,
    InvalidArgument,
    InvalidState,
    OutOfDeviceMemory,
    VaultError,
    check_integer,
    counted,
    shown,
)
from ..report import PhaseTimer
from .components import Components, quiesce
from .sleep import backing_up

Tensors = Mapping[str, tuple[int, int]]  # address and bytes of each

_MOST_NAME = 256  # characters
_ALIGNMENT = 16  # of what a kernel digests
_STAGING_BYTES, _LEAST_STAGING_BYTES = 512 << 20, 4 << 20
_MOST_TEXT = 64 << 20


@dataclass(frozen=True)
class _Tensor:
    """A tensor of this process; digested as a segment is, by its number."""

    id: int
    name: str
    address: int
    bytes: int
    segment: _core.Segment

    @property
    def device(self) -> int:
        return self.segment.device


class _TensorPlace(NamedTuple):
    """Where a tensor lies in what is kept, and its digest."""

    bytes: int
    entry: int
    offset: int
    digest: str


class _Part(NamedTuple):
    """What is copied at once: of an entry, by way of the staging memory."""

    entry: int
    offset: int
    address: int
    bytes: int


def offer(components: Components, name: str, tensors: Tensors) -> None:
    """As `CuMemAllocator.offer`."""
    mine = _checked(name, tensors)
    if components.compressor.on:
        raise InvalidState("only backups that are not compressed are kept under a name: CUMEM_SLEEP_COMPRESS=off")
    store, vault = components.store, components.store.memory.vault
    segments = list({each.segment.id: each.segment for each in mine}.values())
    if vault is None or not vault.keeps_names():
        raise InvalidState("only a vault with --keep-weights keeps tensors under a name")
    with _core.HeldSegments(segments) as held, ExitStack() as copying:
        _check_all_there(segments, held)
        quiesce(held)
        store.catalogue.back_up_parts({}, held)
        with backing_up(components, held, held, PhaseTimer(), looks_meanwhile=True) as work:
            while not work.attempt(copying):
                pass
            digests = {key: str(digest) for key, digest in components.digester.of(_as_segments(mine)).items()}
        backups = [store.catalogue.get_or_raise(segment) for segment in segments]
        numbers = {segment.id: number for number, segment in enumerate(segments)}
        places = {
            each.name: _TensorPlace(
                each.bytes, numbers[each.segment.id], each.address - each.segment.address, digests[each.id]
            )
            for each in mine
        }
        vault.keep(name, _manifest(name, places), [backup.extents for backup in backups])


def adopt(components: Components, name: str, tensors: Tensors) -> bool:
    """As `CuMemAllocator.adopt`."""
    mine = _checked(name, tensors)
    vault = components.store.memory.vault
    found = None if vault is None else vault.adopt(mine[0].device, name)
    if vault is None or found is None:
        return False
    manifest, extents = found
    try:
        places = _places(name, manifest)
        _check_fit(name, mine, places)
        segments = list({each.segment.id: each.segment for each in mine}.values())
        with _core.HeldSegments(segments) as held:
            _check_all_there(segments, held)
            quiesce(held)
            try:
                for device, those in by_device(_as_segments(mine)).items():
                    _copy(vault, device, cast("list[_Tensor]", those), places, extents)
                _prove(components.digester, vault, name, mine, places, extents)
            except BaseException as error:
                refusal = _spoil(mine)
                if isinstance(error, Exception):
                    raise AdoptionFailed(name, (str(error) or repr(error)) + refusal) from error
                raise
    finally:
        vault.release(extents)
    return True


def _checked(name: str, tensors: Tensors) -> list[_Tensor]:
    """Where they lie. Raises InvalidArgument, InvalidState: as `CuMemAllocator.offer`."""
    if not isinstance(name, str) or not 1 <= len(name) <= _MOST_NAME or not name.isprintable():
        raise InvalidArgument(f"name={shown(name):.300}: expected 1 to {_MOST_NAME} characters that can be printed")
    if not tensors:
        raise InvalidArgument("tensors={}: expected at least one")
    segments = sorted(_core.segments(), key=lambda segment: segment.address)
    starts = [segment.address for segment in segments]
    found = []
    for number, (tensor, place) in enumerate(tensors.items()):
        if not isinstance(tensor, str) or not isinstance(place, (tuple, list)) or len(place) != 2:
            raise InvalidArgument(f"{shown(tensor):.300}: {shown(place):.300}: expected a name, and (address, bytes)")
        address, nbytes = place
        check_integer(f"address of {tensor}", address, minimum=1, maximum=MOST_ADDRESS)
        check_integer(f"bytes of {tensor}", nbytes, minimum=1)
        if address % _ALIGNMENT or nbytes % _ALIGNMENT:
            raise InvalidArgument(
                f"{tensor}: address=0x{address:x}, nbytes={nbytes}: expected multiples of {_ALIGNMENT}"
            )
        at = bisect_right(starts, address) - 1
        if at < 0 or address + nbytes > starts[at] + segments[at].bytes:
            raise InvalidArgument(f"{tensor}: address=0x{address:x}, nbytes={nbytes}: not in one segment of this layer")
        if segments[at].sleep != _core.Segment.Sleep.AWAKE:
            raise InvalidState(f"{tensor} sleeps: wake it first")
        found.append(_Tensor(number, tensor, address, nbytes, segments[at]))
    for before, each in pairwise(sorted(found, key=lambda each: each.address)):
        if each.address < before.address + before.bytes:
            raise InvalidArgument(f"{each.name} overlaps {before.name}: give each byte once")
    return found


def _as_segments(tensors: Sequence[_Tensor]) -> list[_core.Segment]:
    """For digests, which look at nothing but what tensors have, too."""
    return cast("list[_core.Segment]", tensors)


def _check_all_there(segments: Sequence[_core.Segment], held: Sequence[_core.Segment]) -> None:
    if len(held) < len(segments):
        raise InvalidState("some of this memory was freed meanwhile")


# The manifest: the digest of the rest and of the name, then JSON, compressed


def _manifest(name: str, places: Mapping[str, _TensorPlace]) -> str:
    content = zlib.compress(json.dumps(places, separators=(",", ":")).encode())
    return b64encode(_proof(name, content) + content).decode()


def _places(name: str, manifest: str) -> dict[str, _TensorPlace]:
    try:
        whole = b64decode(manifest, validate=True)
        proof, content = whole[:32], whole[32:]
        if proof != _proof(name, content):
            raise ValueError("its digest differs")
        text = zlib.decompressobj().decompress(content, _MOST_TEXT)
        return {each: _TensorPlace(*place) for each, place in json.loads(text).items()}
    except (ValueError, zlib.error) as error:
        raise VaultError(f"what the vault keeps as {name!r} cannot be read: {error}") from None


def _proof(name: str, content: bytes) -> bytes:
    return sha256(name.encode() + b"\0" + content).digest()


def _check_fit(name: str, tensors: Sequence[_Tensor], places: Mapping[str, _TensorPlace]) -> None:
    wanted = {each.name: each.bytes for each in tensors}
    there = {each: place.bytes for each, place in places.items()}
    if wrong := sorted(wanted.items() ^ there.items()):
        tensor = wrong[0][0]
        sizes = f"{wanted.get(tensor, 'none')} bytes here, and {there.get(tensor, 'none')} there"
        raise InvalidState(f"{name!r} holds other tensors: {tensor} has {sizes} ({len(wrong)} differ in all)")


# Copying


def _copy(
    vault: VaultTier,
    device: int,
    tensors: Sequence[_Tensor],
    places: Mapping[str, _TensorPlace],
    extents: Sequence[Extent],
) -> None:
    """Through staging memory in two halves. A vault that is lost may still write to that, which nobody else uses then,
    and never to tensors, which their owner goes on to fill in another way.
    """
    with ExitStack() as stack:
        staging = stack.enter_context(closing(_staging(device, 2 * sum(each.bytes for each in tensors))))
        half = staging.bytes // 2
        streams = [stack.enter_context(_core.CopyStream(device)) for _ in range(2)]
        lane_group = stack.enter_context(vault.lane_group())
        lanes = [lane_group.lane(stream) for stream in streams]
        before: tuple[Lane, int, list[_Part]] | None = None
        for number, parts in enumerate(_batches(tensors, places, half)):
            lane, start = lanes[number % 2], staging.address + number % 2 * half
            at = start
            for entry, some in groupby(parts, lambda part: part.entry):
                rows = []
                for part in some:
                    rows.append((at, part.offset, part.bytes))
                    at += part.bytes
                lane.begin(extents[entry], tuple(rows), out=False)
            _pass_on(before)
            before = lane, start, parts
        _pass_on(before)
        for lane in lanes:
            lane.synchronize()


def _pass_on(batch: tuple[Lane, int, list[_Part]] | None) -> None:
    """What has come into one half, to where it belongs."""
    if batch is not None:
        lane, at, parts = batch
        lane.join()
        for part in parts:
            lane.stream.within_devices(part.address, at, part.bytes)
            at += part.bytes


def _batches(tensors: Sequence[_Tensor], places: Mapping[str, _TensorPlace], most_bytes: int) -> list[list[_Part]]:
    """All of them in the order of their entries, so much at a time."""
    batches: list[list[_Part]] = [[]]
    left = most_bytes
    for each in sorted(tensors, key=lambda each: places[each.name][1:3]):
        _, entry, offset, _ = places[each.name]
        done = 0
        while done < each.bytes:
            if not left:
                batches.append([])
                left = most_bytes
            nbytes = min(left, each.bytes - done)
            batches[-1].append(_Part(entry, offset + done, each.address + done, nbytes))
            done, left = done + nbytes, left - nbytes
    return batches


def _staging(device: int, enough: int) -> _core.Scratch:
    """As much as there is, up to what is enough."""
    nbytes = min(_STAGING_BYTES, max(_LEAST_STAGING_BYTES, 1 << (enough - 1).bit_length()))  # halves are whole pages
    while True:
        try:
            return _core.Scratch(device, nbytes)
        except OutOfDeviceMemory:
            if nbytes <= _LEAST_STAGING_BYTES:
                raise
            nbytes //= 2


def _prove(
    digester: DeviceDigester,
    vault: VaultTier,
    name: str,
    tensors: Sequence[_Tensor],
    places: Mapping[str, _TensorPlace],
    extents: Sequence[Extent],
) -> None:
    """Compare all digests with those of when it was offered."""
    found = digester.of(_as_segments(tensors))
    wrong = [each for each in tensors if str(found[each.id]) != places[each.name].digest]
    if wrong:
        vault.mark_corrupt([[extents[places[each.name].entry]] for each in wrong])
        first = wrong[0]
        raise VaultError(
            f"{first.name} of {name!r} has digest {found[first.id]}, and had {places[first.name].digest} when it was"
            f" offered ({counted(len(wrong), 'tensor')} in all): the vault gives them to nobody else"
        )


def _spoil(tensors: Sequence[_Tensor]) -> str:
    """So that nobody takes for whole what is not. Returns why that cannot be done, if it cannot."""
    refusal = ""
    for device, mine in by_device(_as_segments(tensors)).items():
        try:
            with _core.CopyStream(device) as stream:
                for each in mine:
                    stream.fill(each.address, 0xFF, each.bytes)
                stream.synchronize()
        except DriverError as error:
            refusal = f"; they cannot be filled with NaN: {error}"
    return refusal
