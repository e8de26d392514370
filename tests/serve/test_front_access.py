"""Who may ask what of the front, and that no other way to write a path says something else."""

from __future__ import annotations

import time

import pytest
from front_world import World, a_world, ask, get, post
from hypothesis import given, settings
from hypothesis import strategies as st
from processor import is_within

from cumem_sleep.http.asgi import not_canonical
from cumem_sleep.serve import hosts
from cumem_sleep.serve.access import Access, place_of
from cumem_sleep.serve.config import FrontConfig
from cumem_sleep.serve.fleet import ServerFailed

TOKEN, KEY = "operator's-token", "client's-key"
DEV_MODE = r"""
/sleep /wake_up /is_sleeping /collective_rpc /reset_prefix_cache /reset_mm_cache /server_info /update_weights
/pause /start_weight_update /finish_weight_update /resume /abort_requests /v1/load_lora_adapter
/v1/unload_lora_adapter /adapters /scale_elastic_ep /start_profile /reload_weights /wake /openapi.json /docs /load
/weight_checker /fault_tolerance/apply
"""
ODD = r"""
/{0} //{0} /./{0} /x/../{0} /%2f{0} /{0}/ /{0}// /{0}%00 /{0}%0a /{0};x=1 /{0}%20 /%2e/{0} /v1/..%2f{0} \{0}
/%5c{0} /v1/responses/..%2f..%2f{0} /v1/responses/%2e%2e/{0} /models/one/{0} /models/one//{0}
/v1/completions%3f/{0} /models/one/v1/responses/../../{0} /v1/completions/../../{0} /v1/responses/x/../{0}
/v1/completions#/{0} http://127.0.0.1/{0} http://127.0.0.1//{0}
"""


def bearer(token: str) -> str:
    return f"Authorization: Bearer {token}"


async def raw(world: World, request: bytes) -> bytes:
    client = await world.client()
    await client.send(request)
    return await client.reader.readline()


@pytest.mark.parametrize("path", DEV_MODE.split())
async def test_what_servers_have_beside_the_models_cannot_be_reached(path: str) -> None:
    """Whoever asks, and however the path is written."""
    async with a_world("one", api_keys=[KEY], admin_token=TOKEN) as world:
        server = await world.server("one")
        for odd in ("{0}", *ODD.split()):
            target = odd.format(path.lstrip("/") if odd != "{0}" else path)
            for method in ("POST", "GET"):
                body = b'{"model": "one"}' if method == "POST" else b""
                lines = [
                    f"{method} {target} HTTP/1.1",
                    "Host: front",
                    f"Content-Length: {len(body)}",
                    bearer(TOKEN),
                ]
                status = await raw(world, "\r\n".join((*lines, "Connection: close", "", "")).encode() + body)
                assert status.split()[1] in (b"200", b"400", b"404", b"405"), (target, status)
        lines = {asked.line for asked in server.asked}
        assert lines <= {"POST /v1/completions HTTP/1.1"}, "what is before a fragment"


PARTS = "/ // sleep collective_rpc v1 models one completions responses tokenize cancel .. . %2f %2e %00 \\ ? # : @ r_1"
PIECES = st.sampled_from((*PARTS.split(), "http://x", " ", "é", "admin", "\n", "\x00", "a" * 300))


@given(st.lists(PIECES, max_size=12).map("".join) | st.text(max_size=40))
@settings(max_examples=150, deadline=None)
def test_only_paths_of_the_list_become_targets(path: str) -> None:
    place = place_of("/" + path)
    if place is None or place.name:
        return
    target = place_of(place.target)
    assert target is not None
    assert target.target == place.target
    assert not any(name in place.target for name in ("sleep", "rpc", "admin", "..", "//", "%", "\\", "\n", " "))


@given(st.lists(PIECES, min_size=1, max_size=8).map("".join))
@settings(max_examples=100, deadline=None)
def test_a_path_that_can_be_read_in_two_ways_is_not_canonical(path: str) -> None:
    scope = {"path": "/" + path, "raw_path": ("/" + path).encode()}
    odd = "//" in "/" + path or "\\" in path or "%2f" in path or not path.isprintable()
    odd |= any(part in (".", "..") for part in path.split("/"))
    assert bool(not_canonical(scope)) == odd


def test_a_long_path_costs_no_more_than_it_has_bytes() -> None:
    began = time.process_time()
    for _ in range(20):
        assert place_of("/models/" + "a/" * 31_000) is None
        place = place_of(f"/models/{'a/' * 300}b/v1/responses/{'x' * 256}/cancel")
        assert place is not None
        assert place.model == "a/" * 300 + "b"
    assert is_within(time.process_time() - began, 1.0)


@pytest.mark.parametrize("lines", [(), (bearer("wrong"),), (bearer(KEY + "x"),), ("Authorization: Basic " + KEY,)])
async def test_without_a_key_nothing_is_told_or_done(lines: tuple[str, ...]) -> None:
    async with a_world(api_keys=["other", KEY], admin_token=TOKEN) as world:
        server = await world.server("one")
        looks = (
            "/v1/models",
            "/v1/models/one",
            "/models/one/v1/models",
            "/status",
            "/status/live",
            "/metrics",
            "/version",
            "/nothing",
        )
        requests = [get(path, *lines) for path in looks]
        requests += [post("/v1/completions", b'{"model": "one"}', *lines), post("/admin/stop", b"{}", *lines)]
        for request in requests:
            answer = await world.ask(request)
            assert (answer.code, answer.headers["www-authenticate"]) == (401, "Bearer"), request
            assert answer.error["type"] == "AuthenticationError"
        for path in ("/", "/page.js", "/health"):
            assert (await world.ask(get(path, *lines))).code == 200
        assert world.fleet.calls == server.asked == []


async def test_a_key_opens_the_models_and_the_token_everything_and_no_server_sees_them() -> None:
    async with a_world(api_keys=["other", KEY], admin_token=TOKEN) as world:
        server = await world.server("one")
        for token in (KEY, "other", TOKEN):
            lines = (bearer(token), f"x-api-key: {token}")  # as clients of /v1/messages do
            request = post("/v1/completions", b'{"model": "one"}', *lines)
            assert (await world.ask(request)).code == 200
            assert (await world.ask(get("/v1/models", bearer(token)))).code == 200
        assert [asked.header("authorization") for asked in server.asked] == [None] * 3
        assert [asked.header("x-api-key") for asked in server.asked] == [None] * 3
        call = b'{"model": "one"}'
        assert (await world.ask(post("/admin/sleep", call, bearer(KEY)))).code == 401
        assert world.fleet.calls == []
        assert (await world.ask(post("/admin/sleep", call, bearer(TOKEN)))).code == 200
        assert world.fleet.calls == [("sleep", "one", None)]


async def test_only_an_operator_hears_the_last_words_of_a_server() -> None:
    async with a_world("one", api_keys=[KEY], admin_token=TOKEN) as world:
        world.fleet.refusal = ServerFailed("its server ended", 1.0, "its log ends with: a secret")
        answer = await world.ask(post("/v1/completions", b'{"model": "one"}', bearer(KEY)))
        assert answer.code == 503
        assert answer.json["error"]["message"] == "its server ended"
        assert b"secret" not in (await world.ask(get("/v1/models", bearer(KEY)))).body
        answer = await world.ask(post("/admin/wake", b'{"model": "one"}', bearer(TOKEN)))
        assert answer.json["error"]["message"] == "its server ended; its log ends with: a secret"


@pytest.mark.parametrize("path", ["/admin/sleep", "/admin/wake", "/admin/stop"])
async def test_without_an_admin_token_nobody_is_an_operator(path: str) -> None:
    async with a_world() as world:
        for lines in ((), (bearer(""),), (bearer("None"),)):
            assert (await world.ask(post(path, b'{"model": "one"}', *lines))).code == 403
        assert world.fleet.calls == []


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        (("Origin: http://elsewhere",), 403),
        (("Origin: null",), 403),
        (("Origin: http://front", "Sec-Fetch-Site: cross-site"), 403),
        (("Sec-Fetch-Site: same-site",), 403),
        (("Origin: http://front",), 200),
        (("Origin: https://proxy", "Sec-Fetch-Site: same-origin"), 200),
        ((), 200),
    ],
)
async def test_a_page_of_somebody_else_cannot_make_a_browser_wake_models(lines: tuple[str, ...], code: int) -> None:
    """A form or script of any page may post plain text anywhere without being asked."""
    async with a_world("one", admin_token=TOKEN) as world:
        server = await world.server("one")
        request = post("/v1/completions", b'{"model": "one"}', "Content-Type: text/plain", *lines)
        assert (await world.ask(request)).code == code
        assert len(server.asked) == (code == 200)


ELSEWHERE = [
    ("Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: no-cors", "Sec-Fetch-Dest: image"),
    ("Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate", "Sec-Fetch-Dest: document"),
    ("Sec-Fetch-Site: Same-Site",),
    ("Origin: http://elsewhere",),
    ("Referer: http://elsewhere/page", "User-Agent: Mozilla/5.0"),
    ("Referer: http://frontier/", "User-Agent: Mozilla/5.0"),
]
FROM_HERE = [
    (),
    ("Sec-Fetch-Site: same-origin",),
    ("Sec-Fetch-Site: none",),
    ("Referer: http://front/", "User-Agent: Mozilla/5.0"),
    ("Referer: https://a.program/", "User-Agent: python-requests/2"),
]


@pytest.mark.parametrize("lines", [*ELSEWHERE, *FROM_HERE])
async def test_an_image_on_a_page_of_somebody_else_wakes_nothing(lines: tuple[str, ...]) -> None:
    async with a_world("one") as world:
        server = await world.server("one")
        code = 403 if lines in ELSEWHERE else 200
        for path in ("/models/one/v1/responses/x", "/v1/responses/x", "/status", "/v1/models"):
            assert (await world.ask(get(path, *lines))).code == code, path
        assert len(server.asked) == 2 * (code == 200)
        assert (await world.ask(get("/", *lines))).code == 200, "a link may lead to the page"
        assert (await world.ask(get("/health", *lines))).code == 200


LOOPBACK = ["localhost", "LocalHost:8000", "localhost.", "a.localhost:1", "127.0.0.1:80", "127.9.9.9", "[::1]:8000"]
LOOPBACK += ["[0:0:0:0:0:0:0:1]", "[::ffff:127.0.0.1]", "127.0.0.1.", "localhost:"]
OTHERS = ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "evillocalhost"]
OTHERS += ["169.254.169.254", "10.0.0.1:8000", "[::2]:8000", "0.0.0.0", "127.1", "2130706433", "0x7f.0.0.1"]
WRONG = [
    "",
    "localhost@evil.example",
    "a b",
    "[::1",
    "::1",
    "[localhost]",
    "localhost..",
    "localhost:x",
    "[::1]x",
    "é",
    ",",
]


async def code_of(world: World, *hosts: str, target: str = "/v1/models", version: str = "1.1", more: str = "") -> int:
    lines = [f"GET {target} HTTP/{version}", *(f"Host: {host}" for host in hosts), *([more] if more else [])]
    return int((await raw(world, "\r\n".join((*lines, "", "")).encode("latin-1"))).split()[1])


async def test_only_known_hosts_may_be_asked() -> None:
    """A page of another origin that gave its own name this address is not told from the front's own otherwise."""
    async with a_world("one", allowed_hosts=[]) as world:
        server = await world.server("one")
        assert [host for host in LOOPBACK if await code_of(world, host) != 200] == []
        assert [host for host in OTHERS if await code_of(world, host) != 403] == []
        assert [host for host in WRONG if await code_of(world, host) != 400] == []
        assert await code_of(world) == 400, "HTTP/1.1 wants one"
        assert await code_of(world, version="1.0") == 200
        assert await code_of(world, "evil.example", version="1.0") == 403
        for two in (("localhost", "evil.example"), ("evil.example", "localhost"), ("localhost", "localhost")):
            assert await code_of(world, *two) == 400
        for path in ("/", "/health", "/nothing"):
            assert await code_of(world, "evil.example", target=path) == 403
        answer = await world.ask(ask().replace(b"Host: front", b"Host: evil.example"))
        assert (answer.code, "allowed_hosts" in answer.error["message"]) == (403, True)
        assert server.asked == []


async def test_the_host_of_an_absolute_target_counts() -> None:
    async with a_world("one", allowed_hosts=[]) as world:
        for version in ("1.0", "1.1"):
            for host in ("localhost", "evil.example"):
                evil = "http://evil.example/v1/models"
                assert await code_of(world, host, target=evil, version=version) == 403
                good = "HTTP://LOCALHOST:8000/v1/models"
                assert await code_of(world, host, target=good, version=version) == 200
        assert await code_of(world, target="http://localhost@evil.example/v1/models") in (400, 403)
        assert await code_of(world, target="http://evil.example@localhost/v1/models") == 400
        assert await code_of(world, "localhost", "localhost", target="http://evil.example/v1/models") == 403


async def test_with_keys_any_host_may_be_asked_unless_some_are_set() -> None:
    """Nobody gets anything without a key, and a page of somebody else has none."""
    for allowed, code in (([], 200), (["front.example"], 403)):
        async with a_world("one", allowed_hosts=allowed, api_keys=[KEY]) as world:
            assert await code_of(world, "any.example", more=bearer(KEY)) == code
            assert await code_of(world, "front.example", more=bearer(KEY)) == 200
            assert await code_of(world, "FRONT.example.:80", more=bearer(KEY)) == 200
            assert await code_of(world, "localhost", more=bearer(KEY)) == 200
            assert await code_of(world, "any.example") in (401, 403)


@pytest.mark.parametrize("allowed", ["*", "front.example", "10.1.2.3", "::2", "[0::2]"])
async def test_hosts_can_be_allowed(allowed: str) -> None:
    host = {"*": "any", "::2": "[0:0::2]:8000", "[0::2]": "[::2]"}.get(allowed, allowed)

    async with a_world("one", allowed_hosts=[hosts.parse_allowed(allowed)], host="0.0.0.0") as world:
        assert await code_of(world, host) == 200
        assert await code_of(world, "0.0.0.0:8000") == 200, "where it listens"
        assert await code_of(world, "other.example") == (200 if allowed == "*" else 403)


def test_the_address_that_a_client_reached_is_a_host() -> None:
    """As where it listens at all addresses."""
    access = Access(FrontConfig(host="0.0.0.0"))
    for server, host, code in (
        ("10.0.0.7", "10.0.0.7:8000", 0),
        ("10.0.0.7", "10.0.0.8", 403),
        ("fe80::7", "[fe80::7]", 0),
    ):
        scope = {"headers": [(b"host", host.encode())], "http_version": "1.1", "server": (server, 8000)}
        fault = access.host_fault(scope)
        assert (fault[0] if fault else 0) == code


async def test_websockets_are_refused() -> None:
    async with a_world("one") as world:
        lines = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Key: x", "Sec-WebSocket-Version: 13")
        answer = await world.ask(get("/v1/realtime?model=one", *lines))
        assert answer.code == 501
        assert "websockets are not served" in answer.error["message"]
