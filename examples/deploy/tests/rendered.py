"""The Kubernetes manifests as `kubectl apply -k` sends them: each overlay, built by kustomize itself.

In the wheel of a small vendor, since Debian's kubectl has a kustomize that knows no `labels`, and kustomize's own
releases are in no package index. Kustomize 5.5 in kubectl 1.32 has made the same of both overlays.
"""

from __future__ import annotations

import asyncio
import functools
import pathlib
import re
from typing import Any

import pykustomize
import yaml

DEPLOY = pathlib.Path(__file__).parent.parent
SEVERAL_MODELS = DEPLOY.parent.parent / "docs" / "several-models.md"
# How long a front takes to end at most.
(ENDS_WITHIN_S,) = map(int, re.findall(r"within (\d+) s, or 5 s if it is killed", SEVERAL_MODELS.read_text()))
OVERLAYS = sorted(path.name for path in (DEPLOY / "kubernetes" / "overlays").iterdir())


@functools.cache
def resources(overlay: str) -> tuple[dict[str, Any], ...]:
    """All resources of an overlay."""
    built = asyncio.run(pykustomize.build(DEPLOY / "kubernetes" / "overlays" / overlay))
    return tuple(yaml.safe_load_all(built.yaml))


def of_kind(overlay: str, kind: str) -> dict[str, dict[str, Any]]:
    """Those of one kind, by name."""
    return {found["metadata"]["name"]: found for found in resources(overlay) if found["kind"] == kind}


def pods(overlay: str) -> dict[str, dict[str, Any]]:
    """The templates of pods, by name of what makes them."""
    workloads = of_kind(overlay, "DaemonSet") | of_kind(overlay, "Deployment")
    return {name: workload["spec"]["template"] for name, workload in workloads.items()}


def memory_bytes(quantity: str) -> int:
    """`200Gi` in bytes."""
    number, unit = quantity[:-2], quantity[-2:]
    return int(number) << {"Mi": 20, "Gi": 30}[unit]
