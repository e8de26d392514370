"""Digests of files: of all their bytes, and never those that were there before."""

from __future__ import annotations

import hashlib
import os
import pathlib
from collections.abc import Callable

import pytest

from cumem_sleep.errors import InvalidArgument, InvalidState
from cumem_sleep.vllm import file_digests
from cumem_sleep.vllm.file_digests import digests_of, remembered_in

PART = 8 << 20


@pytest.fixture(autouse=True)
def remembering(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a local filesystem has settled is remembered, whatever the tests lie on and however new it is."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(file_digests, "filesystem_of", lambda _: "ext4")
    monkeypatch.setattr(file_digests, "SETTLED_NS", -(10**18))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Where each part began that was read since."""
    starts: list[int] = []
    real = file_digests._part

    def part(descriptor: int, start: int, end: int) -> bytes:
        starts.append(start)
        return real(descriptor, start, end)

    monkeypatch.setattr(file_digests, "_part", part)
    return starts


@pytest.fixture
def weights(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"one weight")
    return path


def digest_of(path: pathlib.Path) -> str:
    return digests_of([path])[0].digest


def in_one_thread(content: bytes) -> str:
    parts = [content[start : start + PART] for start in range(0, len(content), PART)]
    whole = b"".join(hashlib.sha256(part).digest() for part in parts) + str(len(content)).encode()
    return hashlib.sha256(whole).hexdigest()


@pytest.mark.parametrize("nbytes", [0, 1, PART - 1, PART, 2 * PART + 5])
def test_every_byte_counts(weights: pathlib.Path, nbytes: int) -> None:
    content = bytearray(os.urandom(nbytes))
    weights.write_bytes(content)
    assert digest_of(weights) == in_one_thread(content)
    if nbytes:
        content[-1] ^= 1
        weights.write_bytes(content)
        assert digest_of(weights) == in_one_thread(content)


def test_what_nobody_touched_is_not_read_again(tmp_path: pathlib.Path, weights: pathlib.Path, read: list[int]) -> None:
    link = tmp_path / "link"
    link.symlink_to(weights)
    first = digests_of([weights, link])
    read.clear()
    assert digests_of([link, weights]) == first
    assert not read


def written_in_place(path: pathlib.Path) -> None:
    facts = path.stat()
    path.write_bytes(b"two weight")
    while path.stat().st_mtime_ns != facts.st_mtime_ns or path.stat().st_ctime_ns == facts.st_ctime_ns:
        os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))  # until the clock of file times has ticked


def replaced(path: pathlib.Path) -> None:
    facts, other = path.stat(), path.with_name("other")
    other.write_bytes(b"two weight")
    os.utime(other, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    other.rename(path)


def linked_elsewhere(path: pathlib.Path) -> None:
    other = path.with_name("other")
    other.write_bytes(b"two weight")
    path.unlink()
    path.symlink_to(other)


@pytest.mark.parametrize("change", [written_in_place, replaced, linked_elsewhere])
def test_a_change_of_the_same_size_and_time_is_seen(
    weights: pathlib.Path, change: Callable[[pathlib.Path], None]
) -> None:
    before = digests_of([weights])
    change(weights)
    after = digests_of([weights])
    assert after[0].nbytes == before[0].nbytes
    assert after[0].digest == in_one_thread(b"two weight")
    assert after != before


@pytest.mark.parametrize("why", ["it was just changed", "it lies on another host"])
def test_what_cannot_be_trusted_is_read_again(
    weights: pathlib.Path, read: list[int], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    if why == "it was just changed":
        monkeypatch.setattr(file_digests, "SETTLED_NS", 2 * 10**9)
        os.utime(weights, ns=(0, 0))  # ctime is now, whatever mtime says
    else:
        digest_of(weights)  # and what is remembered of it does not count
        monkeypatch.setattr(file_digests, "filesystem_of", lambda _: "nfs4")
    for _ in range(2):
        read.clear()
        digest_of(weights)
        assert read


def flip_a_byte(memory: pathlib.Path) -> None:
    content = bytearray(memory.read_bytes())
    content[content.index(b'"') + 1] ^= 1  # of the digest
    memory.write_bytes(content)


DAMAGE: dict[str, Callable[[pathlib.Path], object]] = {
    "a byte": flip_a_byte,
    "its end": lambda memory: memory.write_bytes(memory.read_bytes()[:-1]),
    "all of it": lambda memory: memory.write_bytes(b""),
    "other rows": lambda memory: memory.write_bytes(
        hashlib.sha256(b"[[1], 2]").hexdigest().encode() + b"\n" + b"[[1], 2]"
    ),
    "no text": lambda memory: memory.write_bytes(hashlib.sha256(b"\xff").hexdigest().encode() + b"\n\xff"),
    "its mode": lambda memory: memory.chmod(0o644),
    "its folder's mode": lambda memory: memory.parent.chmod(0o777),
    "a link": lambda memory: memory.rename(memory.with_name("x")).parent.joinpath(memory.name).symlink_to("x"),
    "a folder": lambda memory: (memory.unlink(), memory.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_what_was_remembered_is_taken_whole_or_not_at_all(
    weights: pathlib.Path, read: list[int], damage: Callable[[pathlib.Path], object]
) -> None:
    digest_of(weights)
    damage(remembered_in())
    read.clear()
    assert digest_of(weights) == in_one_thread(b"one weight")
    assert read


def test_it_is_private_and_does_not_grow(
    tmp_path: pathlib.Path, read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_digests, "MOST_REMEMBERED", 2)
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        path.write_text(path.name)
        digest_of(path)
    assert (remembered_in().stat().st_mode & 0o777, remembered_in().parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert [each.name for each in remembered_in().parent.iterdir()] == [remembered_in().name]
    read.clear()
    digests_of(paths[1:])
    assert not read
    digest_of(paths[0])
    assert read


@pytest.mark.parametrize("cache", ["/proc/1/no", ""])
def test_without_a_place_to_remember_it_is_read_each_time(
    weights: pathlib.Path, read: list[int], monkeypatch: pytest.MonkeyPatch, cache: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    monkeypatch.setattr(pathlib.Path, "home", lambda: (_ for _ in ()).throw(RuntimeError))
    for _ in range(2):
        read.clear()
        assert digest_of(weights) == in_one_thread(b"one weight")
        assert read


@pytest.mark.parametrize("meanwhile", [b"two weight", b"one"])
def test_a_change_while_it_is_read_is_an_error(
    weights: pathlib.Path, monkeypatch: pytest.MonkeyPatch, meanwhile: bytes
) -> None:
    real = file_digests._part

    def part(descriptor: int, start: int, end: int) -> bytes:
        weights.write_bytes(meanwhile)
        return real(descriptor, start, end)

    monkeypatch.setattr(file_digests, "_part", part)
    with pytest.raises(InvalidState, match="while it was being read"):
        digest_of(weights)
    monkeypatch.setattr(file_digests, "_part", real)
    assert digest_of(weights) == in_one_thread(meanwhile)


def test_a_read_that_is_cut_short_is_an_error(weights: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda descriptor, nbytes, start: real(descriptor, nbytes - 1, start))
    with pytest.raises(InvalidState, match="cut off at 9"):
        digest_of(weights)


@pytest.mark.parametrize("what", ["missing", "folder", "pipe"])
def test_what_is_no_file_is_named(tmp_path: pathlib.Path, what: str) -> None:
    path = tmp_path / what
    {"missing": lambda: None, "folder": path.mkdir, "pipe": lambda: os.mkfifo(path)}[what]()
    with pytest.raises(InvalidArgument, match=str(path)):
        digest_of(path)


def test_one_that_another_file_had_is_not_given(weights: pathlib.Path, read: list[int]) -> None:
    """As an inode that is used again."""
    known = digests_of([weights])[0]
    for field, value in (("nbytes", 11), ("mtime_ns", 1), ("ctime_ns", 1)):
        file_digests._remember({"x": known._replace(**{field: value, "digest": "of another"})})
        read.clear()
        assert digests_of([weights]) == [known]
        assert read
