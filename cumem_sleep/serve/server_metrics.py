"""The metrics that models' servers have themselves, as one page of the text format with a label `model`.

prometheus_client could read and write these pages, but takes 0.17 s for that of one vLLM, while streams wait.
"""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..metrics import FRONT, Samples, escaped
from .engines.engine import MOST_SAID
from .fleet import Fleet, ServeError

_NAME = "[a-zA-Z_:][a-zA-Z0-9_:]*"
_TEXT = r'"[^"\\]*(?:\\.[^"\\]*)*"'
_LABEL = re.compile(rf"[ \t]*([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*({_TEXT})[ \t]*(?:,[ \t]*|\Z)")
_SAMPLE = re.compile(
    rf'({_NAME})(?:[ \t]*\{{([^"}}]*(?:{_TEXT}[^"}}]*)*)\}}[ \t]*|[ \t]+)([-+.0-9a-zA-Z]+)([ \t]+-?[0-9]+)?[ \t]*'
)
_HEAD = re.compile(rf"# (?:HELP ({_NAME})(?: .*)?|TYPE ({_NAME}) (?:counter|gauge|histogram|summary|untyped))")
_TAKEN = re.compile("(?:exported_)*model")  # a server's own label is called what Prometheus would call it


@dataclass
class _Family:
    """Lines with one name, which have to stand together."""

    heads: list[str] = field(default_factory=list)
    samples: list[str] = field(default_factory=list)


async def of_all_servers(fleet: Fleet) -> str:
    """What each server that runs says now, and why others say nothing. Wakes nobody."""
    names = list(fleet.config.models)
    pages = await asyncio.gather(*(_page(fleet, name) for name in names))
    return await asyncio.to_thread(joined, dict(zip(names, pages, strict=True)))


async def _page(fleet: Fleet, name: str) -> str | ServeError:
    try:
        return await fleet.metrics_of(name)
    except ServeError as error:
        return error


def joined(pages: Mapping[str, str | ServeError]) -> str:
    """Pages, by model, as one. One with a line that is none is left out: it would cost Prometheus all of them."""
    whole: dict[str, _Family] = {}
    up, left_out = Samples(FRONT), []
    for model, page in pages.items():
        try:
            if not isinstance(page, str):
                raise page
            families = _families(page, f'model="{escaped(model)}"')
        except (ServeError, ValueError) as error:
            left_out.append(f"# {model!r}: {str(error)[:MOST_SAID]!r}")
            families = {}
        up.add("serve_engine_up", int(bool(families)), model=model)
        for name, family in families.items():
            known = whole.setdefault(name, _Family())
            known.heads = known.heads or family.heads
            known.samples += family.samples
    lines = (line for family in whole.values() for line in (*family.heads, *family.samples))
    return up.text() + "".join(f"{line}\n" for line in (*left_out, *lines))


def _families(page: str, model: str) -> dict[str, _Family]:
    """A page's lines by name, with one more label.

    Raises:
        ValueError: a line is neither a sample nor a comment.
    """
    families: defaultdict[str, _Family] = defaultdict(_Family)
    labels = {"": f"{{{model}}}"}
    for line in page.split("\n"):
        if head := _HEAD.fullmatch(line):
            families[head[1] or head[2]].heads.append(line)
        elif line.strip() and not line.startswith("#"):
            if (sample := _SAMPLE.fullmatch(line)) is None:
                raise ValueError(f"no metric: {line}")
            name, said, value, time_ms = sample.groups("")
            float(value)
            if said not in labels:  # they are the same on many lines
                labels[said] = f"{{{','.join((model, *_labels(said)))}}}"
            families[name].samples.append(f"{name}{labels[said]} {value}{time_ms}")
    return families


def _labels(said: str) -> list[str]:
    found, at = [], 0
    while at < len(said):
        if (label := _LABEL.match(said, at)) is None:
            raise ValueError(f"no labels: {said}")
        found.append(f"exported_{label[1]}={label[2]}" if _TAKEN.fullmatch(label[1]) else f"{label[1]}={label[2]}")
        at = label.end()
    return found
