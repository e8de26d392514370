"""The model that a body names is found wherever it stands, however the body is cut, and nothing else is changed."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cumem_sleep.serve import body as bodies
from cumem_sleep.serve.body import BadBody, FormFinder, JsonFinder, ModelFinder, TooMuchStructure, finder_for

LEAVES = st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(max_size=8)
KEYS = st.text(max_size=4) | st.just("model")
JSON = st.recursive(
    LEAVES | st.sampled_from(('"model": "x"', "\\")),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


def feed(finder: ModelFinder, body: bytes, cuts: list[int]) -> ModelFinder:
    edges = sorted({0, *(cut % (len(body) + 1) for cut in cuts), len(body)})
    for start, end in itertools.pairwise(edges):
        finder.feed(body[start:end])
        if finder.name is not None or finder.ended:
            break
    return finder


@given(
    st.lists(st.tuples(st.text(max_size=5).filter(lambda key: key != "model"), JSON), max_size=4),
    st.text(max_size=20),
    st.lists(st.tuples(st.text(max_size=5), JSON), max_size=3),
    st.lists(st.integers(0, 1 << 20), max_size=6),
    st.booleans(),
    st.sampled_from((None, 1)),
)
@settings(max_examples=100, deadline=None)
def test_json(before: Any, name: str, after: Any, cuts: list[int], is_ascii: bool, indent: int | None) -> None:
    members = [*before, ("model", name), *after]
    texts = [f"{json.dumps(key)} : {json.dumps(each, ensure_ascii=is_ascii, indent=indent)}" for key, each in members]
    text = "{" + ",".join(texts) + "}"
    try:
        body = text.encode()
    except UnicodeEncodeError:  # a lone surrogate, which only an escape can write
        return
    finder = feed(JsonFinder(), body, cuts)
    assert finder.name == name
    renamed = finder.renamed("new") + body[len(finder.read) :]
    members[len(before)] = ("model", "new")
    assert json.loads(renamed, object_pairs_hook=list) == json.loads(written(members), object_pairs_hook=list)


def written(members: list[tuple[str, Any]]) -> str:
    return "{" + ",".join(f"{json.dumps(key)}:{json.dumps(value)}" for key, value in members) + "}"


@given(JSON, st.lists(st.integers(0, 1 << 20), max_size=6))
@settings(max_examples=150, deadline=None)
def test_json_without_a_model(value: Any, cuts: list[int]) -> None:
    body = json.dumps(value).encode()
    finder = JsonFinder()
    if isinstance(value, dict) and not isinstance(value.get("model", ""), str):
        with pytest.raises(BadBody):
            feed(finder, body, cuts)
    elif isinstance(value, dict):
        feed(finder, body, cuts)
        assert finder.name == value.get("model")
        assert finder.ended == ("model" not in value)
    else:
        with pytest.raises(BadBody):
            feed(finder, body, cuts)


@given(
    st.lists(st.tuples(st.sampled_from(("file", "language", "models")), st.binary(max_size=40)), max_size=4),
    st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=12),
    st.lists(st.integers(0, 1 << 20), max_size=8),
)
@settings(max_examples=150, deadline=None)
def test_forms(fields: list[tuple[str, bytes]], name: str, cuts: list[int]) -> None:
    def part(key: str, value: bytes, more: str = "") -> bytes:
        return f'--=b0und\r\nContent-Disposition: form-data; name="{key}"{more}\r\n\r\n'.encode() + value + b"\r\n"

    fields = [(key, value) for key, value in fields if b"--=b0und" not in value]
    before = b"".join(part(key, value, '; filename="model"') for key, value in fields)
    end = b"--=b0und--\r\n"
    body = before + part("model", name.encode()) + end
    finder = feed(finder_for('multipart/form-data; charset=x; boundary="=b0und"'), body, cuts)
    assert finder.name == name
    assert finder.renamed("new") + body[len(finder.read) :] == before + part("model", b"new") + end
    finder = feed(FormFinder("multipart/form-data; boundary==b0und"), before + end, cuts)
    assert (finder.name, finder.ended) == (None, True)


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=6))
@settings(max_examples=150, deadline=None)
def test_noise(noise: bytes, cuts: list[int]) -> None:
    """It is found, or not, or refused with the one error; and cutting makes no difference."""

    def outcome(finder: ModelFinder, noise: bytes, cuts: list[int]) -> Any:
        try:
            feed(finder, noise, cuts)
        except BadBody as error:
            return type(error)
        return finder.name, finder.ended

    for start in (b"", b'{"a":', b'{"model":"'):
        assert outcome(JsonFinder(), start + noise, cuts) == outcome(JsonFinder(), start + noise, [])
    form = b"--b\r\n" + noise
    assert outcome(FormFinder("x; boundary=b"), form, cuts) == outcome(FormFinder("x; boundary=b"), form, [])


def test_what_costs_time_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MOST_STRUCTURE", 1000)
    with pytest.raises(TooMuchStructure):
        JsonFinder().feed(b'{"a":' + b"[" * 2000)
    with pytest.raises(BadBody):
        JsonFinder().feed(b'{"model": "' + b"x" * 5000)
    with pytest.raises(BadBody):
        FormFinder("x; boundary=b").feed(b"--b\r\nX: " + b"x" * 20_000)


def test_a_long_string_is_read_once() -> None:
    """Backslashes and quotes at every cut, in 64 KiB pieces: the count of steps grows with the body, not its square."""
    finder, piece = JsonFinder(), b'\\\\\\"' * (1 << 14)
    finder.feed(b'{"prompt": "')
    for _ in range(40):
        finder.feed(piece)
    finder.feed(b'", "model": "m"}')
    assert finder.name == "m"
