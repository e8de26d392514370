"""Packages that have another's name and interface, and are served by this layer, if they come first in PYTHONPATH."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..core import preload

FOLDERS: Mapping[str, Path] = {"torch_memory_saver": preload.library_path().parent}
