"""Which processes that share a NCCL communicator can be checkpointed (level 3), and go on rightly afterwards?

    python benchmarks/checkpoint_ranks.py --out result.json [--nccl libnccl.so.2]          # two GPUs, about two minutes

Two processes, one on each GPU, reduce 64 MiB over NCCL in a CUDA graph, without PyTorch's communicators and without
vLLM. A third one locks, checkpoints, restores and unlocks them; then the graph is replayed and its sums are compared.
Each case is one way for NCCL to move bytes (`TRANSPORTS`), what was done to the communicator before (`TREATMENTS`), and
an order: both ranks at each step (`together`), or one rank after the other (`one by one`). A case ends with the first
step that fails. What works without slowing the ranks down is run again, alone: `CYCLES` times, with the seconds and
what stays on each GPU.

Suspending takes NCCL 2.29.7; PyTorch's may be older, so `--nccl` names the library that both ranks load.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

_NO_CUMEM = {"NCCL_CUMEM_ENABLE": "0", "NCCL_CUMEM_HOST_ENABLE": "0"}
_SHM = {"NCCL_P2P_DISABLE": "1"}
_SOCKETS = {**_SHM, "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}
TRANSPORTS = {
    "P2P, cuMem": {"NCCL_CUMEM_ENABLE": "1"},
    "P2P, CUDA IPC": _NO_CUMEM,
    "SHM, cuMem": {**_SHM, "NCCL_CUMEM_ENABLE": "1"},
    "SHM, cuMem on the GPU only": {**_SHM, "NCCL_CUMEM_ENABLE": "1", "NCCL_CUMEM_HOST_ENABLE": "0"},
    "SHM, no cuMem": {**_SHM, **_NO_CUMEM},
    "sockets, cuMem": {**_SOCKETS, "NCCL_CUMEM_ENABLE": "1"},
    "sockets, no cuMem": {**_SOCKETS, **_NO_CUMEM},
}
TREATMENTS = ("as it is", "suspended", "destroyed")
ORDERS = ("together", "one by one")
CYCLES = 20
_ELEMENTS = 16 << 20
_CASE_LIMIT_S = 40.0  # of the first cycle; starting twelve pairs at once takes most of it
_CYCLE_LIMIT_S = 8.0  # of each later one
_LOCK_LIMIT_S = 5.0


# A rank


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]


class Rank:
    """One process with its communicator, its graph and its sums. Its methods are what the other process may ask."""

    def __init__(self, rank: int, library: str) -> None:
        import torch

        self._rank = rank
        self._nccl = ctypes.CDLL(library)
        torch.cuda.set_device(rank)
        self._mine = torch.empty(_ELEMENTS, device="cuda")
        self._sum = torch.empty_like(self._mine)
        self._communicator = ctypes.c_void_p()
        torch.cuda.synchronize()

    def unique_id(self) -> str:
        unique_id = _UniqueId()
        self._call("ncclGetUniqueId", ctypes.byref(unique_id))
        return bytes(unique_id).hex()

    def version(self) -> int:
        version = ctypes.c_int()
        self._call("ncclGetVersion", ctypes.byref(version))
        return version.value

    def create(self, unique_id: str) -> None:
        """The communicator, and a graph with one reduction."""
        import torch

        its_id = _UniqueId.from_buffer_copy(bytes.fromhex(unique_id))
        self._call("ncclCommInitRank", ctypes.byref(self._communicator), 2, its_id, self._rank)
        self._reduce()  # NCCL connects now, which a capture does not allow everywhere
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._reduce()

    def check(self, seed: int) -> bool:
        """Whether a replay of the graph gives the sum of what both ranks have."""
        import torch

        values = [torch.arange(_ELEMENTS, device="cuda") * (rank + 1) % (1009 + seed) for rank in range(2)]
        self._mine.copy_(values[self._rank])
        self._sum.fill_(-1)
        torch.cuda.synchronize()
        self._graph.replay()
        torch.cuda.synchronize()
        return bool((self._sum == values[0] + values[1]).all())

    def suspend(self) -> None:
        self._call("ncclCommSuspend", self._communicator, 1)

    def resume(self) -> None:
        self._call("ncclCommResume", self._communicator)

    def destroy(self) -> None:
        """With the graph, which would keep it."""
        del self._graph
        self._call("ncclCommDestroy", self._communicator)

    def _reduce(self) -> None:
        import torch

        stream = torch.cuda.current_stream().cuda_stream
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (self._mine, self._sum)]
        count, float32, add = ctypes.c_size_t(_ELEMENTS), 7, 0
        self._call("ncclAllReduce", *pointers, count, float32, add, self._communicator, ctypes.c_void_p(stream))

    def _call(self, name: str, *arguments: Any) -> None:
        self._nccl.ncclGetErrorString.restype = ctypes.c_char_p
        if result := getattr(self._nccl, name)(*arguments):
            raise RuntimeError(f"{name}: {self._nccl.ncclGetErrorString(result).decode()}")


def serve_rank(rank: int, library: str) -> None:
    """Answer the requests of standard input, a line of JSON each."""
    process = Rank(rank, library)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            answer = {"result": getattr(process, name)(*arguments)}
        except (RuntimeError, AttributeError) as error:  # AttributeError: this NCCL does not have it
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


# One case


class Failed(Exception):
    """The step of a case that did not work."""


class Case:
    """Two ranks and what is done with them."""

    def __init__(self, transport: str, treatment: str, order: str, library: str) -> None:
        self.treatment, self.order = treatment, order
        environment = {**os.environ, **TRANSPORTS[transport], "NCCL_NVLS_ENABLE": "0"}
        if "/" in library:  # so that PyTorch does not load another one
            environment["LD_PRELOAD"] = library
        command = [sys.executable, __file__, "--nccl", library, "--rank"]
        self.ranks = [
            subprocess.Popen([*command, str(rank)], env=environment, text=True, stdin=-1, stdout=-1)
            for rank in range(2)
        ]
        self.seconds: dict[str, list[float]] = {}

    def ask(self, name: str, *arguments: Any, of: Sequence[int] = (0, 1)) -> list[Any]:
        """The same of these ranks at once."""
        tell(name)
        for rank in of:
            pipe = self.ranks[rank].stdin
            assert pipe is not None
            pipe.write(json.dumps([name, *arguments]) + "\n")
            pipe.flush()
        answers = []
        for rank in of:
            pipe = self.ranks[rank].stdout
            assert pipe is not None
            if not (line := pipe.readline()):
                raise Failed(f"{name}: rank {rank} ended with {self.ranks[rank].wait()}")
            answers.append(json.loads(line))
        for rank, answer in zip(of, answers, strict=True):
            if "error" in answer:
                raise Failed(f"{name}: rank {rank}: {answer['error']}")
        return [answer["result"] for answer in answers]

    def create(self) -> None:
        self.ask("create", self.ask("unique_id", of=[0])[0])

    def check(self, when: str, seed: int) -> None:
        if not all(self.ask("check", seed)):
            raise Failed(f"wrong sums {when}")

    def cycle(self, seed: int, used_bytes: list[int] | None = None) -> None:
        """Down, and up again.

        Args:
            used_bytes: gets what all processes together use of each GPU meanwhile.
        """
        if self.treatment != "as it is":
            self.ask("suspend" if self.treatment == "suspended" else "destroy")
        self._steps("lock", "checkpoint")
        if used_bytes is not None:
            used_bytes[:] = all_used_bytes()
        self._steps("restore", "unlock")
        if self.treatment == "suspended":
            self.ask("resume")
        elif self.treatment == "destroyed":
            self.create()
        self.check("afterwards", seed)

    def _steps(self, *names: str) -> None:
        each = [(name, rank) for name in names for rank in range(2)]
        if self.order == "one by one":
            each = [(name, rank) for rank in range(2) for name in names]
        for name, rank in each:
            self._step(name, rank)

    def _step(self, name: str, rank: int) -> None:
        from cumem_sleep import _core
        from cumem_sleep.errors import CumemSleepError

        arguments = [self.ranks[rank].pid, _LOCK_LIMIT_S] if name == "lock" else [self.ranks[rank].pid]
        tell(f"{name}, rank {rank}")
        begin = time.monotonic()
        try:
            getattr(_core, f"{name}_process")(*arguments)
        except (CumemSleepError, OSError) as error:
            raise Failed(f"{name}, rank {rank}: {error}") from None
        self.seconds.setdefault(name, []).append(time.monotonic() - begin)

    def close(self) -> None:
        for process in self.ranks:
            process.kill()
        for process in self.ranks:
            with suppress(subprocess.TimeoutExpired):  # a locked one may not die
                process.wait(5)


def tell(step: str) -> None:
    """To who runs this case, who hears no more of it if it hangs."""
    print(step, file=sys.stderr, flush=True)


def all_used_bytes() -> list[int]:
    """By GPU, of all processes."""
    import pynvml

    pynvml.nvmlInit()
    return [pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(each)).used for each in range(2)]


def run_case(transport: str, treatment: str, order: str, library: str, cycles: int) -> dict[str, Any]:
    """In a process of its own, which may be killed."""
    from cumem_sleep.core.driver import open_driver

    open_driver("cuda")
    empty, used = all_used_bytes(), [0, 0]
    case = Case(transport, treatment, order, library)
    outcome: dict[str, Any] = {"cycles": 0}
    try:
        case.create()
        case.check("before", 0)
        outcome["nccl"] = case.ask("version", of=[0])[0]
        awake = all_used_bytes()
        while outcome["cycles"] < cycles:
            case.cycle(outcome["cycles"], used)
            outcome["cycles"] += 1
    except Failed as failed:
        outcome["failed"] = str(failed)
    else:
        if cycles > 1:  # nothing else is on these GPUs
            outcome["awake_bytes"] = [now - before for now, before in zip(awake, empty, strict=True)]
            outcome["left_bytes"] = [now - before for now, before in zip(used, empty, strict=True)]
    finally:
        case.close()
    return {**outcome, "seconds": case.seconds}


# All of them


def run_apart(case: Sequence[str], library: str, cycles: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--nccl", library, "--case", json.dumps(case), "--cycles", str(cycles)]
    limit_s = _CASE_LIMIT_S + (cycles - 1) * _CYCLE_LIMIT_S
    # Into files: a pipe's end comes only when no rank is left, and a locked one may not die.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, text=True, stdout=out, stderr=errors, start_new_session=True)
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        out.seek(0)
        errors.seek(0)
        told, result = errors.read().strip().splitlines(), out.read().splitlines()
    if process.returncode is None:
        return {"failed": f"hangs after {limit_s:.0f} s, in: {told[-1:]}"}
    if process.returncode:
        return {"failed": f"ended with {process.returncode}: {told[-3:]}"}
    return dict(json.loads(result[-1]))


def row(case: dict[str, Any]) -> str:
    name = f"{case['transport']:28}{case['treatment']:11}{case['order']:12}"
    seconds = {step: f"{statistics.median(each):.3f}" for step, each in case.get("seconds", {}).items()}
    works = f"works, {case.get('cycles')} times, {seconds}, left {case.get('left_bytes', 'not measured')}"
    return name + str(case.get("failed", works))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--nccl", default="libnccl.so.2", help="which library of NCCL (default: PyTorch's)")
    parser.add_argument("--jobs", type=int, default=12, help="cases at a time (default: %(default)s)")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--cycles", type=int, default=CYCLES, help="of a case that works (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.rank is not None:
        serve_rank(arguments.rank, arguments.nccl)
        return
    if arguments.case is not None:
        transport, treatment, order = arguments.case
        print(json.dumps(run_case(transport, treatment, order, arguments.nccl, arguments.cycles)))
        return
    if arguments.out is None:
        parser.error("--out is missing")
    import record

    cases = [(transport, *how) for transport in TRANSPORTS for how in _hows()]
    result: dict[str, Any] = {"machine": record.machine_apart("torch"), "transports": TRANSPORTS, "cases": []}

    def run_and_save(case: Sequence[str], cycles: int) -> dict[str, Any]:
        outcome = {**dict(zip(("transport", "treatment", "order"), case, strict=True)), "asked": cycles}
        outcome |= run_apart(case, arguments.nccl, cycles)
        result["cases"].append(outcome)
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")
        print(row(outcome), flush=True)
        return outcome

    with ThreadPoolExecutor(arguments.jobs) as pool:
        outcomes = list(pool.map(lambda case: run_and_save(case, 1), cases))
    for case, outcome in zip(cases, outcomes, strict=True):
        if "failed" not in outcome and case[:2] == ("P2P, cuMem", "suspended"):
            run_and_save(case, arguments.cycles)


def _hows() -> list[tuple[str, str]]:
    """A destroyed communicator ties no rank to the other, so one order is enough."""
    return [(each, order) for each in TREATMENTS for order in ORDERS if each != "destroyed" or order == "together"]


if __name__ == "__main__":
    main()
