"""The names of the modes."""

from typing import Literal

HookMode = Literal["preload", "torch"]
