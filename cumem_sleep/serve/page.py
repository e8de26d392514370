"""The page at `/`: three files that need no build, no network, and nothing but the front itself."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files

from ..http.asgi import Message, Scope, header

_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self';"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


def file(path: str, scope: Scope) -> list[Message]:
    """One of the page's files."""
    content, tag = _content(path)
    known = header(scope, b"if-none-match") == tag
    headers = {**HEADERS, "content-type": _FILES[path][1], "etag": tag}
    if not known:
        headers["content-length"] = str(len(content))
    lines = [(name.encode(), value.encode()) for name, value in headers.items()]
    return [
        {"type": "http.response.start", "status": 304 if known else 200, "headers": lines},
        {"type": "http.response.body", "body": b"" if known or scope["method"] == "HEAD" else content},
    ]


@cache
def _content(path: str) -> tuple[bytes, str]:
    content = files(__package__).joinpath("static").joinpath(_FILES[path][0]).read_bytes()
    return content, f'"{hashlib.sha256(content).hexdigest()[:16]}"'
