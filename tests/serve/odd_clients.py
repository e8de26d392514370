"""What comes to a front beside requests: clients that leave in every way, bodies of any bytes, other origins and hosts.

Nothing of it may take anything from others, and each is answered by what it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket

HEARD_WITHIN_S = 400.0
ELSEWHERE = ("Origin: http://elsewhere", "Sec-Fetch-Site: cross-site", "Host: evil.example")
ELSEWHERE += ("Host: localhost@evil.example", "Host: localhost\r\nHost: localhost")
ELSEWHERE += ("Referer: http://elsewhere/\r\nUser-Agent: Mozilla/5.0",)
LEAVES = (
    "closes",
    "half-closes",
    "resets",
    "closes in the middle",
    "asks for more and closes",
    "sends noise and closes",
)
NOISE = (b"\\", b'"', b"[", b"{", b"]", b"}", b",", b":", b"\x00", b"\xff", b" ", b"1")
NOISE += (b'"model"', b'"mod\\u0065l"', b'"model-1"')


def request(body: bytes, *lines: str, path: str = "/v1/completions", method: str = "POST") -> bytes:
    host = () if any(line.startswith("Host") for line in lines) else ("Host: localhost",)
    head = (f"{method} {path} HTTP/1.1", *host, *lines, f"Content-Length: {len(body)}", "Connection: close", "", "")
    return "\r\n".join(head).encode() + body


async def leave(port: int, chance: random.Random, body: bytes) -> None:
    """Send a request, and leave, at once or a moment later."""
    how = chance.choice(LEAVES)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    whole = request(body).replace(b"Connection: close", b"X-Odd: yes")
    if how == "asks for more and closes":
        whole = whole * chance.randint(2, 5)
    elif how == "sends noise and closes":
        whole += chance.randbytes(chance.choice((10, 100_000)))
    elif how == "closes in the middle":
        whole = whole[: chance.randrange(len(whole))]
    with contextlib.suppress(ConnectionError):
        writer.write(whole)
        if chance.random() < 0.5:
            await asyncio.sleep(chance.uniform(0.0, 0.2))
        if how == "half-closes":
            writer.write_eof()
            await asyncio.wait_for(reader.read(), HEARD_WITHIN_S)
        elif how == "resets":
            linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.close()


async def ask_oddly(port: int, whole: bytes) -> tuple[int, bytes]:
    """The status and the body of the answer; status 0 if there is none."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    with contextlib.suppress(ConnectionError):
        writer.write(whole)
        answer = await asyncio.wait_for(reader.read(), HEARD_WITHIN_S)
    writer.close()
    head, _, content = answer.partition(b"\r\n\r\n")
    return (int(head.split()[1]) if head else 0), content


def noise(chance: random.Random, body: bytes) -> bytes:
    """Bytes: a body that is nearly right, one that is right and odd, or none at all."""
    kind = chance.randrange(4)
    if kind == 0:
        return chance.randbytes(chance.randrange(300))
    if kind == 1:
        at = chance.randrange(len(body))
        return body[:at] + chance.choice(NOISE) + body[at + chance.randrange(2) :]
    if kind == 2:
        return b"{" + b"".join(chance.choice(NOISE) for _ in range(chance.randrange(30))) + b"}"
    odd = chance.choice(
        (b'"x": "%b"' % (b"\\\\" * 50_000), b'"x": %b%b' % (b"[" * 500, b"]" * 500), b'"model": "none"')
    )
    return b"{" + odd + b", " + body[1:]


async def odd(port: int, chance: random.Random, name: str, user: str, names: list[str]) -> str:
    """Do something odd; returns what is wrong with what came of it, "" if nothing is."""
    body = json.dumps({"model": name, "user": user, "max_tokens": chance.randint(1, 12), "prompt": "?" * 50}).encode()
    what = chance.choice((leave, ask_from_elsewhere, ask_noise))
    if what is leave:
        await leave(port, chance, body)
        return ""
    if what is ask_from_elsewhere:
        return await ask_from_elsewhere(port, chance, name, body.replace(user.encode(), b"never"))
    return await ask_noise(port, noise(chance, body), names)


async def ask_from_elsewhere(port: int, chance: random.Random, name: str, body: bytes) -> str:
    lines = chance.choice(ELSEWHERE)
    if "Referer" in lines or ("Sec" in lines and chance.random() < 0.5):
        whole = request(b"", lines, path=f"/models/{name}/v1/responses/x", method="GET")
    else:
        whole = request(body, lines)
    status, content = await ask_oddly(port, whole)
    return "" if status in (400, 403) else f"{lines}: {status} {content!r}"


async def ask_noise(port: int, body: bytes, names: list[str]) -> str:
    status, content = await ask_oddly(port, request(body))
    try:
        found = json.loads(body)["model"]
    except (ValueError, KeyError, TypeError, RecursionError):
        found = None
    if isinstance(found, str) and found in names:
        is_right = status in (502, 503) or (status == 200 and f'"model": "{found}"'.encode() in content)
    else:
        is_right = status in (400, 404, 502, 503)
    return "" if is_right else f"{body[:300]!r}: {status} {content!r}"
