"""Where a server listens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Address:
    """Where a server listens.

    Attributes:
        base_url: such as `http://127.0.0.1:8101`, without a slash at the end; with a Unix socket `http://model`.
        socket: path of the Unix socket; None for TCP.
        headers: to send along, such as the server's own API key.
        control: instead of them, with the front's own calls.
    """

    base_url: str
    socket: str | None = None
    headers: tuple[tuple[str, str], ...] = ()
    control: tuple[tuple[str, str], ...] = ()

    @property
    def port(self) -> str:
        """Of TCP."""
        return self.base_url.rpartition(":")[2]

    def __str__(self) -> str:
        return f"unix:{self.socket}" if self.socket else self.base_url


def from_url(url: str, api_key: str | None, token: str | None = None) -> Address:
    """Of `http://HOST:PORT` or `unix:PATH`. `token`: of the gate, where that is not the API key."""
    headers, control = ((("Authorization", f"Bearer {key}"),) if key else () for key in (api_key, token or api_key))
    if url.startswith("unix:"):
        return Address("http://model", url.removeprefix("unix:"), headers, control)
    return Address(url, None, headers, control)
