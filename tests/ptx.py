"""Runs the kernels that the extension brings in PTX, without a GPU: one block, instruction by instruction.

It knows the instructions that these kernels use. Threads run one after another from one barrier to the next, in any
order, and all have to reach the same ones.
"""

from __future__ import annotations

import pathlib
import random
import re
from collections.abc import Callable, Iterator

from cumem_sleep import _core

_MASKS = {"32": (1 << 32) - 1, "64": (1 << 64) - 1}
_BINARY: dict[str, Callable[[int, int], int]] = {
    "add": int.__add__,
    "sub": int.__sub__,
    "mul": int.__mul__,
    "xor": int.__xor__,
    "shr": int.__rshift__,
    "ne": int.__ne__,
    "ge": int.__ge__,
    "lt": int.__lt__,
}


def kernels() -> dict[str, str]:
    """The text of each, by its name, as it lies in the extension."""
    texts = re.findall(rb"\n(\.version [^\0]*)", pathlib.Path(_core.__file__).read_bytes())
    return {re.findall(rb"\.entry (\w+)", text)[0].decode(): text.decode() for text in texts}


class Memory:
    """Words of 8 bytes by their addresses; what is not there cannot be read."""

    def __init__(self) -> None:
        self.words: dict[int, int] = {}

    def pair(self, address: int) -> tuple[int, int]:
        assert address % 16 == 0, "16 bytes at once have to be aligned"
        return self.words[address], self.words[address + 8]

    def put_pair(self, address: int, pair: tuple[int, int]) -> None:
        assert address % 16 == 0
        self.words[address], self.words[address + 8] = pair


class Kernel:
    """One kernel."""

    def __init__(self, text: str) -> None:
        body = text[text.index("{") + 1 :]
        self._instructions: list[tuple[str, str, list[str]]] = []
        self._labels: dict[str, int] = {}
        for line in map(str.strip, body.splitlines()):
            if label := re.fullmatch(r"(\w+):", line):
                self._labels[label[1]] = len(self._instructions)
            elif line and not line.startswith((".", "}")):
                found = re.fullmatch(r"(?:@(%\w+) )?([\w.]+) ?(.*);", line)
                assert found, line
                operands = re.findall(r"\{[^}]*\}|\[[^]]*\]|[^,\s]+", found[3])
                self._instructions.append((found[1] or "", found[2], operands))

    def run(self, memory: Memory, parameters: dict[str, int], block: int, blocks: int, threads: int) -> None:
        """Run one block of so many; `memory` is the GPU's."""
        shared = Memory()
        place = {"%ctaid.x": block, "%nctaid.x": blocks, "%ntid.x": threads}
        running = [self._thread(memory, shared, parameters, {**place, "%tid.x": n}) for n in range(threads)]
        order = [*range(threads)]
        while True:
            random.shuffle(order)
            reached = {next(running[thread], "the end") for thread in order}
            assert len(reached) == 1, f"threads of one block reach {reached}"
            if reached == {"the end"}:
                return

    def _thread(
        self, memory: Memory, shared: Memory, parameters: dict[str, int], registers: dict[str, int]
    ) -> Iterator[str]:
        def value(operand: str) -> int:
            if operand.startswith("%"):
                return registers[operand]
            return int(operand, 0) if operand[0].isdigit() else 0  # the only shared variable is at 0

        def address(operand: str) -> int:
            return sum(map(value, re.split(r"\s*\+\s*", operand[1:-1])))

        def names(operand: str) -> list[str]:
            return re.split(r",\s*", operand[1:-1])

        at = 0
        while True:
            predicate, operation, operands = self._instructions[at]
            at += 1
            if predicate and not registers[predicate]:
                continue
            kind = operation.partition(".")[0]
            first, *others = operands or [""]
            if operation == "ret":
                return
            if operation == "bar.sync":
                yield f"the barrier before instruction {at}"
            elif operation == "bra":
                at = self._labels[first]
            elif operation == "ld.param.u64":
                registers[first] = parameters[others[0][1:-1]]
            elif operation in ("ld.global.v2.u64", "ld.shared.v2.u64"):
                source = shared if "shared" in operation else memory
                registers.update(zip(names(first), source.pair(address(others[0])), strict=True))
            elif operation in ("st.global.v2.u64", "st.shared.v2.u64"):
                low, high = map(value, names(others[0]))
                (shared if "shared" in operation else memory).put_pair(address(first), (low, high))
            elif operation == "ld.global.v4.u32":
                halves = memory.pair(address(others[0]))
                quarters = [part for half in halves for part in (half & _MASKS["32"], half >> 32)]
                registers.update(zip(names(first), quarters, strict=True))
            elif operation == "st.global.v4.u32":
                a, b, c, d = map(value, names(others[0]))
                memory.put_pair(address(first), (a | b << 32, c | d << 32))
            elif kind in ("cvta", "mov") and first.startswith("{"):
                low, high = names(first)
                registers[low], registers[high] = value(others[0]) & _MASKS["32"], value(others[0]) >> 32
            elif kind in ("cvta", "mov") and others[0].startswith("{"):
                low, high = map(value, names(others[0]))
                registers[first] = low | high << 32
            elif kind in ("cvta", "mov"):
                registers[first] = value(others[0])
            elif kind == "mad":
                mask = _MASKS["64" if ".wide." in operation else "32"]
                registers[first] = (value(others[0]) * value(others[1]) + value(others[2])) & mask
            elif kind == "setp":
                registers[first] = _BINARY[operation.split(".")[1]](*map(value, others))
            else:
                width = "64" if ".wide." in operation else operation[-2:]
                registers[first] = _BINARY[kind](*map(value, others)) & _MASKS[width]
