"""models.yaml, read and checked."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict


class ConfigError(ValueError):
    """models.yaml is wrong: file, line, key, value and what is allowed, one fault per line."""


class Model(BaseModel):
    """One model."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Front(BaseModel):
    """The front's own settings.

    Attributes:
        host, port: where it listens.
        api_keys: of clients; without any, everybody may ask.
        admin_token: for everything that changes state; without one, admin paths answer 403 always.
        max_waiting: requests that may wait at a time, over all models.
        max_body_bytes: of one request.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    admin_token: str | None = None
    max_waiting: int = 2000
    max_body_bytes: int = 64 << 20


class Config(BaseModel):
    """Everything."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    front: Front = Front()
    models: dict[str, Model] = {}


def load(path: Path) -> Config:
    """Read a file.

    Raises:
        ConfigError: something in it is wrong.
    """
    raise NotImplementedError
