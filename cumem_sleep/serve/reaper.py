"""Stands over one server: whoever is killed, the front or a reaper, nothing that the server has started stays.

    python -I -S reaper.py FRONT_PID FOLDER LEFT_BY_FRONT COMMAND...

A shell between the front and the server would not pass on that the front has died, and what leaves the server's
process group would be lost. So this process adopts whatever loses its parent below it (PR_SET_CHILD_SUBREAPER), and
finds all of it by its parents. It ends with the front (PR_SET_PDEATHSIG), and does its work through a second one of its
kind: if either is killed, the other one ends the server. Who is stopped (SIGSTOP) goes on to end: what tells of a
parent's end is SIGCONT. It imports nothing of this package, so that it stays small.
"""

from __future__ import annotations

import ctypes
import fcntl
import math
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import NoReturn

TERM_WITHIN_S = 30.0  # what a server that is told to end has, before it is killed
WITHOUT_PARENT_WITHIN_S = 5.0  # and where the front was killed: nobody has a request there any more
ORPHANS_WITHIN_S = 2.0  # and what a server leaves behind, after it has ended
POLL_S = 0.05
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_AWAITED = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGCONT)  # blocked, and taken one by one


def main(arguments: Sequence[str]) -> NoReturn:
    """Run a command until it ends, or this process is told to end it, or the front is gone; then end as it did.

    Args:
        arguments: the front's pid, a folder to remove in the end, the front's folder or lock to remove if it is gone by
            then ("" for none), and the command. The server's pid is written to standard output, whose place standard
            error takes.
    """
    front, folder, left_by_front, *command = int(arguments[0]), *arguments[1:]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    _end_with(front, signal.SIGCONT)
    for locked in _locked():
        os.set_inheritable(locked, False)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    work = partial(_over_server, os.getpid(), command, mask, folder, left_by_front)
    inner = _fork(work, signal.SIGCONT)
    os.dup2(2, 1)
    status = _reap_all(inner, front, TERM_WITHIN_S + ORPHANS_WITHIN_S)
    shutil.rmtree(folder, ignore_errors=True)
    if os.getppid() != front:
        shutil.rmtree(left_by_front, ignore_errors=True)  # if it is a folder
        _remove_lock(left_by_front)
    _end_as(status)


def _remove_lock(left_by_front: str) -> None:
    """The last of the front and its reapers finds it unlocked."""
    for locked in _locked():
        os.close(locked)
    with suppress(OSError):
        lock = os.open(left_by_front, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), os.stat(left_by_front)):
            os.unlink(left_by_front)


def _locked() -> list[int]:
    """The front's lock, if it has one: open here as long as its server lives, and not in the server."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the listing is closed by now
            if int(name) > 2 and os.fstat(int(name)):
                found.append(int(name))
    return found


def _over_server(parent: int, command: list[str], mask: Collection[int], folder: str, left_by_front: str) -> NoReturn:
    server = _fork(partial(_become, command, mask), signal.SIGTERM)
    with suppress(OSError):  # the front is gone
        os.write(1, b"%d\n" % server)
    os.dup2(2, 1)
    status = _reap_all(server, parent, TERM_WITHIN_S)
    shutil.rmtree(folder, ignore_errors=True)
    if os.getppid() != parent:
        _remove_lock(left_by_front)
    _end_as(status)


def _become(command: list[str], mask: Collection[int]) -> NoReturn:
    os.dup2(2, 1)
    os.setpgid(0, 0)  # so that a signal to its own group reaches nobody above it
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python
        signal.signal(ignored, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        os._exit(1)


def _reap_all(child: int, parent: int, within_s: float) -> int:
    """Wait for a child and then for all below this process; returns the child's wait status when nothing is left.

    Args:
        within_s: what they have to end, when this process is told to end them; less if the parent is gone.
    """
    status: int | None = None
    ends_at, is_alone = math.inf, False
    told: set[int] = set()
    not_ours: set[int] = set()
    while True:
        ends = status is not None or bool(told)
        came = signal.sigtimedwait(_AWAITED, POLL_S) if ends else signal.sigwaitinfo(_AWAITED)
        now = time.monotonic()
        is_told = came is not None and came.si_signo != signal.SIGCHLD
        if came is not None and came.si_signo == signal.SIGCONT:  # from anybody, unless the parent is gone
            is_told = os.getppid() != parent
        if is_told and not told:
            ends_at = min(ends_at, now + within_s)
            told.add(child)
            _signal(child, signal.SIGTERM, not_ours)
        if ends and not is_alone and os.getppid() != parent:  # later than its signal, if it has more threads
            is_alone, ends_at = True, min(ends_at, now + WITHOUT_PARENT_WITHIN_S)
        if status is None and (status := _reap().get(child)) is not None:
            # A shell that died of the signal has not passed it on: what it ran has the time that it had.
            is_shell = child in told and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM
            ends_at = ends_at if is_shell else min(ends_at, now + ORPHANS_WITHIN_S)
        if status is not None:
            _reap()
            if not (left := _below().keys() - not_ours):
                return status
            for pid in {each for each, above in _below().items() if above == os.getpid()} & left - told:
                told.add(pid)
                _signal(pid, signal.SIGTERM, not_ours)
        if now >= ends_at:
            for pid in _below():
                _signal(pid, signal.SIGKILL, not_ours)


def _reap() -> dict[int, int]:
    """Children that have ended, with their statuses."""
    ended: dict[int, int] = {}
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = found[1]
    return ended


def _below() -> dict[int, int]:
    """The living processes below this one, with their parents. Source: proc_pid_stat(5)."""
    children: dict[int, list[tuple[int, str]]] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with suppress(OSError, ValueError), open(f"/proc/{name}/stat", errors="replace") as stat:
                state, parent = stat.read().rpartition(")")[2].split()[:2]
                children.setdefault(int(parent), []).append((int(name), state))
    found: dict[int, int] = {}
    parents = [os.getpid()]
    for parent_pid in parents:
        for pid, state in children.get(parent_pid, ()):
            parents.append(pid)
            if state not in "ZX":
                found[pid] = parent_pid
    return found


def _signal(pid: int, number: signal.Signals, not_ours: set[int]) -> None:
    try:
        os.kill(pid, number)
        os.kill(pid, signal.SIGCONT)  # one that is stopped could not end
    except ProcessLookupError:
        pass
    except PermissionError:  # it has become another user's, and is out of reach
        not_ours.add(pid)


def _fork(work: Callable[[], NoReturn], number: signal.Signals) -> int:
    """A child that gets a signal when this process dies; whatever it loses, this process adopts."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    parent = os.getpid()
    pid = os.fork()
    if not pid:
        _end_with(parent, number)
        work()
    return pid


def _end_with(parent: int, number: signal.Signals) -> None:
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGTERM)


def _end_as(status: int) -> NoReturn:
    """End as a child has ended."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError):  # SIGKILL is always as it is
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (number,))
    os._exit(os.WEXITSTATUS(status))


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main(sys.argv[1:])
