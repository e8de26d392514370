"""By which names the front may be asked.

A page on the web may give its own name the front's address ("DNS rebinding"). Then it is of the same origin for a
browser, and only the `Host` header tells.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection
from contextlib import suppress

ANY = "*"
_NAME = r"[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*\.?"
_HEADER = re.compile(rf"(?:\[([0-9A-Fa-f:.]+)\]|({_NAME}))(?::\d{{0,5}})?")


def parse_allowed(value: object) -> str:
    """A setting: `*`, a name, or an address.

    Raises:
        ValueError: it is none of these.
    """
    if isinstance(value, str):
        with suppress(ValueError):
            return plain(str(ipaddress.ip_address(value.removeprefix("[").removesuffix("]"))))
        if value == ANY or re.fullmatch(_NAME, value):
            return plain(value)
    raise ValueError(f"a host name or an IP address, without a port; {ANY} for any")


def in_header(text: str) -> str:
    """The host of a `Host` header in its one form: without a port, small letters, no dot at the end.

    Raises:
        ValueError: it has none.
    """
    found = _HEADER.fullmatch(text)
    if found is None:
        raise ValueError("no host")
    if found[1]:
        ipaddress.IPv6Address(found[1])
    return plain(found[1] or found[2])


def plain(host: str) -> str:
    """A name or address in its one form."""
    host = host.lower().removesuffix(".")
    with suppress(ValueError):
        address = ipaddress.ip_address(host.partition("%")[0])
        return str(getattr(address, "ipv4_mapped", None) or address)
    return host


def fault(asked: Collection[str], allowed: Collection[str]) -> tuple[int, str] | None:
    """Why the `Host` headers of a request name none of its hosts: a status and the reason. Loopback always is one."""
    if len(asked) != 1:
        return 400, f"expected one Host header, not {len(asked)}"
    (text,) = asked
    try:
        host = in_header(text)
    except ValueError:
        return 400, f"Host {text[:200]!r}: expected a host name or an IP address, with or without a port"
    if ANY in allowed or host in allowed or _is_loopback(host):
        return None
    return 403, f"the host {host[:200]!r} is not known here: name it in `front.allowed_hosts` of models.yaml"


def _is_loopback(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False
