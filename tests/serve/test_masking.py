"""Keys in texts for people, and in the variables of a server."""

from __future__ import annotations

import time

import pytest
from processor import is_within

from cumem_sleep.serve.masking import holds_any, masked


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("vllm serve m --api-key k1 k2 --port 1", "vllm serve m --api-key *** --port 1"),
        ("vllm serve m --api-key=k1 --port 1", "vllm serve m --api-key *** --port 1"),
        ("vllm serve m --api_key k1", "vllm serve m --api_key ***"),
        ("vllm serve m --api-k k1", "vllm serve m --api-k ***"),
        ("vllm serve m --api-server-count 2", "vllm serve m --api-server-count 2"),
        ("vllm serve m --hf-token 'a b' --seed 1", "vllm serve m --hf-token *** --seed 1"),
        (
            "vllm serve m --tokenizer t --max-num-batched-tokens 8",
            "vllm serve m --tokenizer t --max-num-batched-tokens 8",
        ),
        ("HF_TOKEN=abc VLLM_API_KEY=abc vllm serve m", "HF_TOKEN=*** VLLM_API_KEY=*** vllm serve m"),
        ("OPENAI_KEY='a b' x", "OPENAI_KEY=*** x"),
        ("args: {'model': 'm', 'api_key': ['k1', 'k2'], 'seed': 0}", "args: {'model': 'm', 'api_key': ***, 'seed': 0}"),
        ('{"password": "k1"}', '{"password": ***}'),
        ("Authorization: Bearer k1", "Authorization: Bearer ***"),
        ("redis://user:longpassword@host/0", "redis://user:***@host/0"),
        ("\x1b[36m--my-own-api-key k1 \x1b[0mdone", "\x1b[36m--my-own-api-key ***"),
        (f"{'A_LONG_' * 12}API_KEY=k1", f"{'A_LONG_' * 12}API_KEY=***"),
        ("the-api-key=k1", "the-api-key ***"),
        ("admin_token:k1, password: k1", "admin_token:*** password: ***"),
        ("vllm serve Qwen/Qwen3-8B --uds /run/s.sock", "vllm serve Qwen/Qwen3-8B --uds /run/s.sock"),
    ],
)
def test_what_is_called_a_key_is_not_shown(text: str, shown: str) -> None:
    assert masked(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "-",
        "a-",
        "_",
        "a",
        "'-",
        "'",
        '"token":[',
        "--token '",
        "token='",
        "bearer ",
        "://a:",
        "--token ",
        "x_key",
        "=",
        "token:",
        "token: ",
        " ",
    ],
)
def test_any_log_is_masked_at_once(text: str) -> None:
    """The last 64 KiB of one are masked while requests wait, in 2 s at most; a third of it in a ninth of that."""
    began = time.process_time()
    masked(text * ((22 << 10) // len(text)))
    assert is_within(time.process_time() - began, 0.22)


def test_a_known_secret_is_not_shown_wherever_it_stands() -> None:
    assert masked("it said s3cret!", ["s3cret"]) == "it said ***!"


def test_a_variable_holds_a_secret_as_a_whole_or_a_long_one_anywhere() -> None:
    assert holds_any("secret", ["secret"])
    assert not holds_any("/home/secret/bin", ["secret"])
    assert holds_any("Bearer 0123456789abcdef", ["0123456789abcdef"])
    assert not holds_any("", ["secret"])
