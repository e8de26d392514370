"""The dashboard against Grafana's schema, as Grafana's own SDK has it. No Grafana runs here."""

from __future__ import annotations

import enum
import json
import os
import sys
import types
import typing
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.deploy
FILE = Path(__file__).parents[2] / "examples" / "deploy" / "grafana" / "cumem-sleep.json"
DASHBOARD = json.loads(FILE.read_text())


@pytest.fixture(scope="module")
def schema() -> types.ModuleType:
    """Its model of a dashboard, with Prometheus's queries and the options of panels."""
    try:
        from grafana_foundation_sdk.cog.plugins import register_default_plugins
        from grafana_foundation_sdk.models import dashboard
    except ImportError:
        why = "grafana-foundation-sdk is not installed: pip install '.[deploy]'"
        pytest.fail(why) if os.environ.get("CI") and sys.version_info >= (3, 11) else pytest.skip(why)
    register_default_plugins()
    return dashboard


def plain(value: Any) -> Any:
    """A model as it goes into a file."""
    if hasattr(value, "to_json"):
        return plain(value.to_json())
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, enum.Enum):
        return value.value
    return [plain(each) for each in value] if isinstance(value, list) else value


def unknown(said: Any, known: Any, where: str) -> list[str]:
    """What a file says that a model of it has lost."""
    if isinstance(said, dict) and isinstance(known, dict):
        return [each for name in said for each in unknown(said[name], known.get(name), f"{where}.{name}")]
    if isinstance(said, list) and isinstance(known, list) and len(said) == len(known):
        pairs = zip(said, known, strict=True)
        return [each for number, (a, b) in enumerate(pairs) for each in unknown(a, b, f"{where}[{number}]")]
    return [] if said == known else [where]


def wrong(value: Any, hint: Any, where: str) -> list[str]:
    """Values of a model that are not of the type that it declares."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return [] if any(not wrong(value, each, where) for each in arguments) else [where]
    if origin is typing.Literal:
        return [] if value in arguments else [where]
    if origin is list and isinstance(value, list):
        return [found for number, each in enumerate(value) for found in wrong(each, arguments[0], f"{where}[{number}]")]
    if origin is dict and isinstance(value, dict):
        return [found for name, each in value.items() for found in wrong(each, arguments[1], f"{where}.{name}")]
    if origin is not None:
        return [where]
    if hint in (object, Any):
        hint = type(value)
    if isinstance(hint, enum.EnumMeta):
        return [] if value in [each.value for each in hint] else [where]
    if isinstance(value, dict) and hasattr(hint, "from_json"):  # some are left as they were
        model = hint.from_json(value)
        return [*unknown(value, plain(model), where), *wrong(model, hint, where)]
    if not isinstance(hint, type) or not isinstance(value, (int, float) if hint is float else hint):
        return [where]
    if not hasattr(value, "to_json"):
        return []
    hints = typing.get_type_hints(type(value))
    return [found for name in hints for found in wrong(getattr(value, name), hints[name], f"{where}.{name}")]


def faults(schema: types.ModuleType, said: Any) -> list[str]:
    model = schema.Dashboard.from_json(said)
    return [*unknown(said, plain(model), ""), *wrong(model, schema.Dashboard, "")]


def test_the_dashboard_is_one_by_grafanas_schema(schema: types.ModuleType) -> None:
    assert faults(schema, DASHBOARD) == []


def test_what_is_wrong_is_seen(schema: types.ModuleType) -> None:
    for change in (
        {"refersh": "30s"},
        {"tags": "vllm"},
        {"graphTooltip": "1"},
        {"templating": {"list": [{"name": "front", "type": "query", "multy": True}]}},
        {"templating": {"list": [{"name": "front", "type": "query", "multi": "yes"}]}},
        {"panels": [{**DASHBOARD["panels"][1], "targets": [{"refId": "A", "query": "up"}]}]},
        {"panels": [{**DASHBOARD["panels"][1], "gridPos": {"x": "left"}}]},
        {"panels": [{**DASHBOARD["panels"][1], "fieldConfig": {"defaults": {"custom": {"fillOpacity": "much"}}}}]},
    ):
        assert faults(schema, {**DASHBOARD, **change}), change


def test_panels_do_not_overlap_and_are_told_apart() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
