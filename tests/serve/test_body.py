"""The model that a body names is found wherever it stands, however the body is cut, and nothing else is changed."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from processor import is_within

from cumem_sleep.serve.body import BadBody, FormFinder, JsonFinder, ModelFinder, finder_for, renamed

LEAVES = st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(max_size=8)
KEYS = st.text(max_size=4) | st.just("model")
JSON = st.recursive(
    LEAVES | st.sampled_from(('"model": "x"', "\\")),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


def pieces_of(body: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, *(cut % (len(body) + 1) for cut in cuts), len(body)})
    return [body[start:end] for start, end in itertools.pairwise(edges)]


def look(finder: ModelFinder, body: bytes, cuts: list[int]) -> ModelFinder:
    for piece in pieces_of(body, cuts):
        finder.look(piece)
    finder.finish()
    return finder


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.text(max_size=5), JSON), max_size=4),
    st.text(max_size=20),
    st.lists(st.tuples(st.text(max_size=5), JSON) | st.tuples(st.just("model"), st.text(max_size=5)), max_size=3),
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
    finder = look(JsonFinder(), body, cuts)
    last = max(number for number, (key, _) in enumerate(members) if key == "model")
    assert finder.name == members[last][1]
    changed = b"".join(renamed(pieces_of(body, cuts), finder.span, finder.written("new")))
    members[last] = ("model", "new")
    assert json.loads(changed, object_pairs_hook=list) == json.loads(written(members), object_pairs_hook=list)


def written(members: list[tuple[str, Any]]) -> str:
    return "{" + ",".join(f"{json.dumps(key)}:{json.dumps(value)}" for key, value in members) + "}"


@given(JSON, st.lists(st.integers(0, 1 << 20), max_size=6))
@settings(max_examples=50, deadline=None)
def test_json_without_a_model(value: Any, cuts: list[int]) -> None:
    body = json.dumps(value).encode()
    if isinstance(value, dict) and isinstance(value.get("model", ""), str):
        finder = look(JsonFinder(), body, cuts)
        assert (finder.name, finder.ended) == (value.get("model"), True)
    else:
        with pytest.raises(BadBody):
            look(JsonFinder(), body, cuts)


TOKENS = (
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    '"',
    "\\",
    '"model"',
    '"\\u006dodel"',
    '"mod\\u0065l"',
    '"a"',
    '"one"',
    '"two\\""',
)
TOKENS += ("1e999", "-", "NaN", "null", " ", "\n", "\ufeff", "é", '{"model": "in"}', "[" * 900 + "]" * 900, "9" * 5000)


@pytest.mark.slow
@given(st.lists(st.sampled_from(TOKENS), max_size=14), st.booleans(), st.lists(st.integers(0, 1 << 20), max_size=6))
@settings(max_examples=1500, deadline=None)
def test_of_what_a_server_accepts_it_finds_what_the_server_finds(
    tokens: list[str], is_framed: bool, cuts: list[int]
) -> None:
    text = "".join(tokens)
    body = (f'{{"model": "first", {text}, "a": 1}}' if is_framed else text).encode()
    try:
        accepted = json.loads(body)
    except (ValueError, RecursionError):
        return
    if isinstance(accepted, dict) and isinstance(accepted.get("model", ""), str):
        assert look(JsonFinder(), body, cuts).name == accepted.get("model")
    else:
        with pytest.raises(BadBody):
            look(JsonFinder(), body, cuts)


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (b'{"model": "one", "model": "two"}', "two"),
        (b'{"model": 5, "\\u006d\\u006F\\u0064el": "two"}', "two"),
        (b'{"a": {"model": "in"}, "model": "out", "b": [{"model": "in"}]}', "out"),
        (b'\xef\xbb\xbf{"model": "one"}', "one"),
        (b'{"models": "a", "mode": "b", "Model": "c", "\\model": "d", "model": "one"}', "one"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b', "model": "deep"}', "deep"),
        (b'{"a": -' + b"9" * 100_000 + b'e999, "model": "huge"}', "huge"),
        (b'{"a": "\\\\\\"", "model": "\\ud83d\\ude00"}', "\U0001f600"),
    ],
)
def test_bodies_that_are_read_in_two_ways_by_careless_readers(body: bytes, name: str) -> None:
    for cuts in ([], list(range(min(len(body), 3000)))):
        assert look(JsonFinder(), body, cuts).name == name


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_other_encodings_than_utf_8_are_refused(encoding: str) -> None:
    """Python's JSON reads them, no standard allows them."""
    with pytest.raises(BadBody, match="UTF-8"):
        look(JsonFinder(), '{"model": "one"}'.encode(encoding), [])


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
    finder = look(finder_for('multipart/form-data; charset=x; boundary="=b0und"'), body, cuts)
    assert finder.name == name
    changed = b"".join(renamed(pieces_of(body, cuts), finder.span, finder.written("new")))
    assert changed == before + part("model", b"new") + end
    finder = look(FormFinder("multipart/form-data; boundary==b0und"), before + end, cuts)
    assert (finder.name, finder.ended) == (None, True)
    twice = part("model", b"other") + body
    assert look(FormFinder("multipart/form-data; boundary==b0und"), twice, cuts).name == name, "the last one counts"


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=6))
@settings(max_examples=150, deadline=None)
def test_noise(noise: bytes, cuts: list[int]) -> None:
    """It is found, or not, or refused with the one error; and cutting makes no difference."""

    def outcome(finder: ModelFinder, noise: bytes, cuts: list[int]) -> Any:
        try:
            look(finder, noise, cuts)
        except BadBody as error:
            return type(error)
        return finder.name, finder.ended

    for start in (b"", b'{"a":', b'{"model":"'):
        assert outcome(JsonFinder(), start + noise, cuts) == outcome(JsonFinder(), start + noise, [])
    form = b"--b\r\n" + noise
    assert outcome(FormFinder("x; boundary=b"), form, cuts) == outcome(FormFinder("x; boundary=b"), form, [])


def test_what_has_no_end_is_refused() -> None:
    with pytest.raises(BadBody):
        JsonFinder().look(b'{"model": "' + b"x" * 5000)
    with pytest.raises(BadBody):
        FormFinder("x; boundary=b").look(b"--b\r\nX: " + b"x" * 20_000)
    with pytest.raises(BadBody):
        FormFinder("x; boundary=b").look(b"--b" + b"\r\n\r\n\r\n--b" * 3000)
    with pytest.raises(BadBody):
        FormFinder("x; boundary=" + "-" * 1000)


HEAD = b"\r\nContent-Disposition: "
COSTLY = {
    "backslashes": (JsonFinder, b'{"prompt": "', b"\\"),
    "quotes": (JsonFinder, b'{"prompt": [', b'"",'),
    "brackets": (JsonFinder, b'{"prompt": ', b"["),
    "keys": (JsonFinder, b"{", b'"a":1,'),
    "escaped keys": (JsonFinder, b"{", b'"\\u006dode":1,'),
    "models": (JsonFinder, b"{", b'"model":"a",'),
    "half boundaries": (
        lambda: FormFinder("x; boundary=" + "-" * 70),
        b"--" + b"-" * 70 + b"\r\n\r\n",
        b"\r\n--" + b"-" * 69,
    ),
    "long fields": (lambda: FormFinder("x; boundary=b"), b"--b", HEAD + b'; name="\\model' * 900 + b"\r\n\r\n\r\n--b"),
}


@pytest.mark.parametrize("kind", COSTLY)
def test_each_byte_costs_the_same_and_little(kind: str) -> None:
    """By the median of some rounds, since others use this machine, too."""
    new, before, unit = COSTLY[kind]
    piece = unit * ((64 << 10) // len(unit))
    finder = new()
    finder.look(before)
    costs_s = []
    for _ in range(32):
        started = time.process_time()
        finder.look(piece)
        costs_s.append(time.process_time() - started)
    assert is_within(sorted(costs_s)[16], 0.020 / 16), "20 ms for each MiB"
