"""Pages of the text format as one, with a label that tells them apart: those of models' servers, and of nodes.

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


def joined(pages: Mapping[str, str | ServeError], label: str = "model", up_metric: str = "serve_engine_up") -> str:
    """Pages, by model or node, as one. One with a line that is none is left out: it would cost Prometheus all of them.

    Args:
        label: that each sample gets; one of its own goes by what Prometheus would call it.
        up_metric: 1 for each page that is in it.
    """
    whole: dict[str, _Family] = {}
    up, left_out = Samples(FRONT), []
    for owner, page in pages.items():
        try:
            if not isinstance(page, str):
                raise page
            families = _families(page, label, escaped(owner))
        except (ServeError, ValueError) as error:
            left_out.append(f"# {owner!r}: {str(error)[:MOST_SAID]!r}")
            families = {}
        up.add(up_metric, int(bool(families)), **{label: owner})
        for name, family in families.items():
            known = whole.setdefault(name, _Family())
            known.heads = known.heads or family.heads
            known.samples += family.samples
    lines = (line for family in whole.values() for line in (*family.heads, *family.samples))
    return up.text() + "".join(f"{line}\n" for line in (*left_out, *lines))


def _families(page: str, label: str, owner: str) -> dict[str, _Family]:
    """A page's lines by name, with one more label.

    Raises:
        ValueError: a line is neither a sample nor a comment.
    """
    families: defaultdict[str, _Family] = defaultdict(_Family)
    own = f'{label}="{owner}"'
    labels = {"": f"{{{own}}}"}
    for line in page.split("\n"):
        if head := _HEAD.fullmatch(line):
            families[head[1] or head[2]].heads.append(line)
        elif line.strip() and not line.startswith("#"):
            if (sample := _SAMPLE.fullmatch(line)) is None:
                raise ValueError(f"no metric: {line}")
            name, said, value, time_ms = sample.groups("")
            float(value)
            if said not in labels:  # they are the same on many lines
                labels[said] = f"{{{','.join((own, *_labels(said, label)))}}}"
            families[name].samples.append(f"{name}{labels[said]} {value}{time_ms}")
    return families


def _labels(said: str, label: str) -> list[str]:
    found, at, taken = [], 0, re.compile(f"(?:exported_)*{label}")
    while at < len(said):
        if (each := _LABEL.match(said, at)) is None:
            raise ValueError(f"no labels: {said}")
        found.append(f"exported_{each[1]}={each[2]}" if taken.fullmatch(each[1]) else f"{each[1]}={each[2]}")
        at = each.end()
    return found
