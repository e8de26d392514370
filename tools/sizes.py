"""Prints how large the project is, and fails above the bounds of tools/sizes.txt, or if two classes have one name.

python tools/sizes.py    # in a checkout; .ci/run does it in a copy of the tracked files
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "cumem_sleep"


def files(patterns: list[str]) -> Iterator[Path]:
    """Those that match, but for those that match a pattern behind `!`."""
    left_out = {path for pattern in patterns if pattern[0] == "!" for path in ROOT.glob(pattern[1:])}
    for pattern in patterns:
        if pattern[0] != "!":
            yield from {*ROOT.glob(pattern)} - left_out


def size(unit: str, patterns: list[str]) -> int:
    """In lines or in words."""
    texts = (path.read_text("utf-8") for path in files(patterns))
    return sum(len(text.split()) if unit == "words" else text.count("\n") for text in texts)


def doubled_names() -> dict[str, list[str]]:
    """Names of classes and of aliases of types that stand for several things in the package, and where."""
    places: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            aliases = [target.id for target in getattr(node, "targets", []) if isinstance(target, ast.Name)]
            names = [node.name] if isinstance(node, ast.ClassDef) else [n for n in aliases if n[0] != "_"]
            for name in names:
                if re.fullmatch(r"_?[A-Z][a-z]\w*", name):
                    places.setdefault(name, []).append(str(path.relative_to(PACKAGE)))
    return {name: where for name, where in places.items() if len(where) > 1}


def main() -> None:
    """Exits with 1 if something is above its bound, or named twice."""
    is_too_much = False
    for line in (ROOT / "tools" / "sizes.txt").read_text("utf-8").splitlines():
        if not line.startswith("#"):
            name, bound, unit, *patterns = line.split()
            found, most = size(unit, patterns), int(bound)
            is_too_much |= found > most
            print(f"{name:12}{found:7,} of {most:7,} {unit}{'  TOO MUCH' if found > most else ''}")
    if is_too_much:
        print("Make it smaller, or raise the bound in a commit that says for what.", file=sys.stderr)
    doubled = doubled_names()
    for name, where in doubled.items():
        print(f"two classes are called {name}: {', '.join(where)}", file=sys.stderr)
    sys.exit(is_too_much or bool(doubled))


if __name__ == "__main__":
    main()
