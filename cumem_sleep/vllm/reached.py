"""All that a model reaches at one moment: Python values, which objects they are, where tensors lie, and their bytes.

Two of these tell whether a load has changed anything but parameters' bytes. What C extensions keep for themselves is
not among it, nor are modules' globals.
"""

from __future__ import annotations

import types
import weakref
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping
from functools import partial
from hashlib import sha256
from typing import Any

import torch

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...))
_ATOMS = (types.ModuleType, types.BuiltinFunctionType, types.CodeType, property, staticmethod, classmethod)
_IN_LINE = (list, tuple, deque)
# Nothing of a model's is kept in classes of these, and there are many.
_STATELESS = ("builtins", "torch", "typing", "abc", "enum", "collections", "functools", "pydantic", "dataclasses")


class Reached:
    """Facts by path.

    Args:
        root: the model.
        but_bytes_of: addresses of storages whose bytes do not count.
        but: names of attributes that do not count.
        beyond: objects that nothing is followed into.
    """

    def __init__(
        self, root: Any, but_bytes_of: Container[int], but: Container[str] = (), beyond: Iterable[Any] = ()
    ) -> None:
        self._facts: dict[str, tuple[Any, ...]] = {}
        # Those reached. They live as long as this, so that no other gets the identity of one.
        self._objects = {id(each): each for each in beyond}
        self._storages: dict[int, str] = {}
        self._but_bytes_of, self._but = but_bytes_of, but
        todo = deque([("model", root)])  # the nearest first: they name what several reach
        while todo:
            path, value = todo.popleft()
            if isinstance(value, _PLAIN):
                self._facts[path] = type(value), repr(value)
                continue
            self._facts[path] = type(value), id(value)
            if id(value) not in self._objects:
                self._objects[id(value)] = value
                self._facts[f"{path} "] = self._content(value)
                todo += ((path + name, each) for name, each in self._parts(value))

    def change_to(self, after: Reached) -> str:
        """The shortest path to something that differs; "" if nothing does."""
        paths = self._facts.keys() | after._facts.keys()
        changed = [path for path in paths if self._facts.get(path) != after._facts.get(path)]
        return min(changed, key=lambda path: (len(path), path), default="").strip()

    def __len__(self) -> int:
        return len(self._facts)

    def _content(self, value: Any) -> tuple[Any, ...]:
        """What of it is not among its parts."""
        if hasattr(type(value), "untyped_storage"):
            return self._tensor(value)
        if isinstance(value, (Mapping, set, frozenset, *_IN_LINE)):
            return (len(value),)
        if isinstance(value, (type, types.FunctionType, *_ATOMS)):
            return ()
        try:
            return (sha256(memoryview(value).tobytes()).digest(),)
        except (TypeError, ValueError):
            pass
        try:
            return () if hasattr(value, "__dict__") else (repr(value),)
        except Exception as error:  # some class's own
            return (repr(error),)

    def _tensor(self, tensor: Any) -> tuple[Any, ...]:
        facts = [tensor.dtype, tuple(tensor.shape), str(tensor.device), tensor.requires_grad]
        try:
            storage = tensor.untyped_storage()
            place = storage.data_ptr(), storage.nbytes(), tensor.storage_offset(), tensor.stride()
        except Exception:  # it wraps others, which are its attributes
            return tuple(facts)
        address, nbytes = place[:2]
        if address and address not in self._but_bytes_of:
            if address not in self._storages:
                whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (nbytes,), (1,))
                self._storages[address] = sha256(whole.cpu().numpy().tobytes()).hexdigest()
            facts.append(self._storages[address])
        return (*facts, *place)

    def _parts(self, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, _ATOMS):
            return
        if isinstance(value, type):
            yield from self._attributes(value)
            return
        if isinstance(value, types.FunctionType):
            yield ".__defaults__", value.__defaults__
            yield ".__kwdefaults__", value.__kwdefaults__
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                try:
                    yield f".<{name}>", cell.cell_contents
                except ValueError:  # there is nothing in it yet
                    continue
        elif isinstance(value, types.MethodType):
            yield ".__self__", value.__self__
            yield ".__func__", value.__func__
        elif isinstance(value, partial):
            yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
        elif isinstance(value, weakref.ref):
            yield "()", value()
        if isinstance(value, Mapping):
            for key, each in list(value.items()):
                plain = isinstance(key, _PLAIN)
                yield f"[{key!r}]" if plain else f"[{type(key).__name__} {id(key)}]", each
                if not plain:
                    yield f".key {id(key)}", key
        elif isinstance(value, (set, frozenset)):
            yield from ((f".{each!r}" if isinstance(each, _PLAIN) else f".{id(each)}", each) for each in list(value))
        elif isinstance(value, _IN_LINE):
            yield from ((f"[{index}]", each) for index, each in enumerate(list(value)))
        yield from self._attributes(value)
        for each in type(value).__mro__:
            slots = vars(each).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if not name.startswith("__") and hasattr(value, name):
                    yield f".{name}", getattr(value, name)
        for each in type(value).__mro__:
            if each.__module__.partition(".")[0] not in _STATELESS:
                yield f".<class {each.__name__}>", each

    def _attributes(self, value: Any) -> Iterator[tuple[str, Any]]:
        try:
            own = list(vars(value).items())
        except TypeError:
            return
        is_class = isinstance(value, type)
        for name, each in own:
            if name in self._but or (is_class and (name.startswith("__") or isinstance(each, types.FunctionType))):
                continue
            yield f".{name}", each
