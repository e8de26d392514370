"""Who may ask what: the only paths that the front knows, and what each of them needs.

What is not listed here does not exist, whatever the servers behind it have: /sleep, /collective_rpc, /server_info, …
A path that goes on to a server is written anew from this list, never copied from the request.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from ..http.asgi import Scope, bearer, has_bearer_token, header
from ..http.model_paths import NEEDS_SERVER, RUNS_MODEL
from . import hosts
from .config import FrontConfig

MODELS = "/models/"  # /models/NAME/v1/…: a model by path
_LONGEST_REST = 512  # of a path, after a model's name: the next line has the longest
_RESPONSE = re.compile(r"/v1/responses/([A-Za-z0-9_-]{1,256})(/cancel)?")
_QUERY = re.compile(rb"[!-~]*")


class Need(Enum):
    """What a request has to bear."""

    NOTHING = "nothing"
    KEY = "an API key"  # if there are any; the admin token does as well
    ADMIN = "the admin token"


@dataclass(frozen=True)
class PathMeaning:
    """What a path is.

    Attributes:
        methods: that it takes.
        name: of the page or call; "" for what a model's server answers.
        target: the path for the server.
        model: that the path names.
        has_body: the model is to be looked for in the body.
    """

    need: Need
    methods: tuple[str, ...]
    name: str = ""
    target: str = ""
    model: str | None = None
    has_body: bool = False


_OWN = {
    **{path: PathMeaning(Need.NOTHING, ("GET", "HEAD"), path) for path in ("/", "/page.css", "/page.js", "/icon.svg")},
    **{path: PathMeaning(Need.NOTHING, ("GET", "HEAD"), "/health") for path in ("/health", "/ping")},
    **{path: PathMeaning(Need.KEY, ("GET",), path) for path in ("/v1/models", "/status", "/status/live", "/metrics")},
    **{path: PathMeaning(Need.KEY, ("GET",), path) for path in ("/version", "/v1/realtime", "/models/metrics")},
    **{path: PathMeaning(Need.ADMIN, ("POST",), path) for path in ("/admin/sleep", "/admin/wake", "/admin/stop")},
    "/admin/drain": PathMeaning(Need.ADMIN, ("POST",), "/admin/drain"),
    "/admin/log": PathMeaning(Need.ADMIN, ("GET",), "/admin/log"),
}
_MODEL = {path: PathMeaning(Need.KEY, ("POST",), target=path, has_body=True) for path in (*RUNS_MODEL, *NEEDS_SERVER)}
del _MODEL["/v1/responses/{response_id}/cancel"]


def place_of(path: str) -> PathMeaning | None:
    """What a path is, if it is anything. It has to be canonical."""
    if place := _OWN.get(path) or _MODEL.get(path):
        return place
    if path.startswith("/v1/models/"):
        return PathMeaning(Need.KEY, ("GET",), "/v1/models/NAME", model=path.removeprefix("/v1/models/"))
    if found := _RESPONSE.fullmatch(path):
        return PathMeaning(Need.KEY, ("POST",) if found[2] else ("GET",), target=path)
    if path.startswith(MODELS):
        return _by_path(path)
    return None


def _by_path(path: str) -> PathMeaning | None:
    # A name may have slashes: the longest rest that is known counts.
    for at in range(max(len(MODELS) + 1, len(path) - _LONGEST_REST), len(path)):
        if path[at] != "/":
            continue
        rest, name = path[at:], path[len(MODELS) : at]
        if rest in _MODEL:
            return PathMeaning(Need.KEY, ("POST",), target=rest, model=name)
        if rest in ("/v1/models", "/metrics"):
            return PathMeaning(Need.KEY, ("GET",), f"/models/NAME{rest}", model=name)
        if (place := place_of(rest) if _RESPONSE.fullmatch(rest) else None) is not None:
            return PathMeaning(Need.KEY, place.methods, target=rest, model=name)
    return None


def query_is_plain(scope: Scope) -> bool:
    """Whether the query has nothing in it that could end a line or a word of HTTP."""
    return _QUERY.fullmatch(bytes(scope.get("query_string", b""))) is not None


def comes_from_elsewhere(scope: Scope, place: PathMeaning | None) -> bool:
    """Whether a browser sends this for a page that is not the front's own: any page may ask any address.

    What a page embeds, as an image, bears no `Origin`, and browsers say where it comes from (`Sec-Fetch-Site`) only to
    addresses that they trust, such as localhost. `Referer` remains, but other clients set it to what they like, and
    a page may have it left out: then nothing goes on to a server, which might have to be woken for it.
    """
    site = header(scope, b"sec-fetch-site")
    if site:
        return site.lower() not in ("same-origin", "none")
    origin = header(scope, b"origin")
    if not origin and scope["method"] in ("GET", "HEAD") and "mozilla" in header(scope, b"user-agent").lower():
        origin = "/".join(header(scope, b"referer").split("/")[:3])
        if not origin and place is not None and place.target:
            return True
    return bool(origin) and origin.partition("://")[2].lower() != header(scope, b"host").lower()


class Access:
    """Checks what requests bear."""

    def __init__(self, settings: FrontConfig) -> None:
        self._admin = [settings.admin_token] if settings.admin_token else []
        self._keys = list(settings.api_keys)
        self._hosts = list(settings.allowed_hosts) or ([hosts.ANY] if self._keys else [])
        self._hosts.append(hosts.plain(settings.host))

    @property
    def has_admin(self) -> bool:
        """Whether there is an admin token at all."""
        return bool(self._admin)

    def is_admin(self, scope: Scope) -> bool:
        """Whether a request bears the admin token."""
        return bool(self._admin) and has_bearer_token(scope, self._admin)

    def has_key(self, scope: Scope) -> bool:
        """Whether a request bears an API key or the admin token, or there are no keys."""
        return not self._keys or has_bearer_token(scope, self._keys + self._admin)

    def host_fault(self, scope: Scope) -> tuple[int, str] | None:
        """Why the host that a request asks is none of the front's: a status and the reason.

        The address that the client reached is, and so is each name if there are keys and no `allowed_hosts`: nobody
        gets anything without a key.
        """
        asked = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if not asked and scope["http_version"] == "1.0":
            return None  # no browser
        reached = scope.get("server") or ("",)
        allowed = {*self._hosts, hosts.plain(str(reached[0]))}
        return hosts.fault(asked, allowed)

    def is_ours(self, scope: Scope) -> bool:
        """Whether what a request bears is a key of this front, which no server is to see."""
        return bool(bearer(scope)) and (bool(self._keys) or self.is_admin(scope))
