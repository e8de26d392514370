"""`scoped`: `contextlib.contextmanager` for what must have ended when its `with` statement has, however that ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import _GeneratorContextManager
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

_Given = TypeVar("_Given")
_Arguments = ParamSpec("_Arguments")


class _Scope(_GeneratorContextManager[_Given]):
    """If a signal handler raises while this is entered or left, its generator is closed at once.

    By itself it would be closed when nobody has the exception any more, whose traceback holds it.
    """

    def __enter__(self) -> _Given:
        try:
            return super().__enter__()
        except BaseException:
            self.gen.close()
            raise

    def __exit__(self, *error: object) -> bool | None:
        try:
            return super().__exit__(*error)  # type: ignore[arg-type]
        except BaseException:
            self.gen.close()
            raise


def scoped(
    function: Callable[_Arguments, Iterator[_Given]],
) -> Callable[_Arguments, _GeneratorContextManager[_Given]]:
    """As `contextlib.contextmanager`."""

    @wraps(function)
    def scope(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _GeneratorContextManager[_Given]:
        return _Scope(cast(Any, function), args, kwargs)

    return scope
