"""The page at `/`: three files that need no build, no network, and nothing but the front itself."""

from __future__ import annotations

from importlib.resources import files

from ..http.asgi import Message, Scope

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
    name, kind = _FILES[path]
    content = files(__package__).joinpath("static").joinpath(name).read_bytes()
    headers = {**HEADERS, "content-type": kind, "content-length": str(len(content))}
    lines = [(name.encode(), value.encode()) for name, value in headers.items()]
    return [
        {"type": "http.response.start", "status": 200, "headers": lines},
        {"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else content},
    ]
