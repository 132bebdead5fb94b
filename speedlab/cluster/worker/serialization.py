"""Serialize functions, classes and objects of a notebook, and of modules in its folder, by value.

An engine can import installed packages only. It must not import from a notebook's folder: it may run elsewhere, or may
have imported an older version of a module.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import pickle
import site
import sys
import sysconfig
import threading
import types
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import cloudpickle

from speedlab.cluster.errors import ClusterError

_ALWAYS_THERE = frozenset({"speedlab", "cuda_ops", "speedlab_notebook", cloudpickle.__name__})
"""Packages that every engine has, wherever they are installed."""
_NAMESPACE = "the engine's namespace"
_registering = threading.Lock()


class _Pickler(cloudpickle.Pickler):
    """Pickler that replaces the globals of a notebook by a reference to the engine's namespace."""

    _namespace = object()

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.globals_ref[id(sys.modules["__main__"].__dict__)] = self._namespace

    def persistent_id(self, obj: Any) -> str | None:
        return _NAMESPACE if obj is self._namespace else None

    def reducer_override(self, obj: Any) -> Any:
        # Move tensors to the CPU: the engine may number devices differently, or may not have the device.
        torch = sys.modules.get("torch")
        if torch is not None and type(obj) is torch.Tensor and obj.device.type not in ("cpu", "meta"):
            return obj.cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return super().reducer_override(obj)


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, namespace: dict[str, Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._namespace = namespace

    def persistent_load(self, pid: Any) -> Any:
        assert pid == _NAMESPACE
        return self._namespace


class Globals(dict[str, Any]):
    """Globals of functions from a notebook: first those that were sent along, then those of the engine's namespace."""

    def __init__(self, namespace: MutableMapping[str, Any]) -> None:
        super().__init__(__name__="__main__")
        self._namespace = namespace

    def __missing__(self, name: str) -> Any:
        return self._namespace[name]

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Copy what a function binds with `global` inside the block to the engine's namespace."""
        before = dict(self)
        try:
            yield
        finally:
            self._namespace.update({k: v for k, v in self.items() if k not in before or before[k] is not v})


def pack(thing: Any, parts: Mapping[str, Any]) -> bytes:
    """Serialize an object.

    Args:
        thing: Object.
        parts: Its parts by the names that the user knows, for the error message.

    Returns:
        Bytes for `unpack`, in a process that shares no state with this one.

    Raises:
        ClusterError: If something cannot be pickled, such as a lock or an open file; names the part.
    """
    try:
        with _by_value():
            return _dump(thing)
    # A module may contain something that cannot be pickled. If engines can import the module, its name is enough.
    except Exception:
        try:
            return _dump(thing)
        except Exception as error:
            faults = ((name, part, fault) for name, part in parts.items() if (fault := _fault(part)) is not None)
            name, part, fault = next(faults, ("what was given", thing, error))
            name, part, fault = _blame(part, name, fault, set())
            raise ClusterError(
                f"{name} (a {type(part).__name__}) cannot be sent to the engines: {fault}; make it there, in the "
                f"function that runs on them or that makes the model"
            ) from None


def unpack(data: bytes, namespace: dict[str, Any] | None = None) -> Any:
    """Return the object that was packed.

    Args:
        data: Result of `pack`.
        namespace: Further globals of functions from a notebook.
    """
    return _Unpickler(data, {"__name__": "__main__"} if namespace is None else namespace).load()


def _dump(thing: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer).dump(thing)
    return buffer.getvalue()


@contextlib.contextmanager
def _by_value() -> Iterator[None]:
    """Pickle functions and classes of modules that are not installed by value, inside the block."""
    # cloudpickle's registry is global: one thread at a time.
    with _registering:
        known = cloudpickle.list_registry_pickle_by_value()
        modules = [module for module in _modules_of_the_user() if module.__name__ not in known]
        for module in modules:
            cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            for module in modules:
                cloudpickle.unregister_pickle_by_value(module)


def _modules_of_the_user() -> list[types.ModuleType]:
    """Return imported top-level modules that are not installed, but stored in a folder of the user."""
    found = []
    for name, module in list(sys.modules.items()):
        if "." in name or name in _ALWAYS_THERE or name == "__main__" or getattr(module, "__name__", None) != name:
            continue
        file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)
        if isinstance(file, str) and not _is_installed(file):
            found.append(module)
    return found


@functools.cache
def _is_installed(file: str) -> bool:
    """Return whether a file belongs to the standard library or to an installed package."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = [*(sysconfig.get_path(name) for name in names), *site.getsitepackages(), site.getusersitepackages()]
    return os.path.realpath(file).startswith(tuple(os.path.realpath(folder) + os.sep for folder in folders))


# ---- find what cannot be pickled -------------------------------------------------------------------------------------


def _fault(thing: Any) -> Exception | None:
    """Return why an object cannot be pickled; None if it can."""
    try:
        with _by_value():
            _dump(thing)
    except Exception as error:
        return error
    return None


def _blame(thing: Any, name: str, fault: Exception, seen: set[int]) -> tuple[str, Any, Exception]:
    """Return the innermost part that cannot be pickled, among those that the user wrote: name, object, error."""
    seen.add(id(thing))
    for part_name, part in _parts(thing, name):
        if id(part) not in seen and (inner := _fault(part)) is not None:
            return _blame(part, part_name, inner, seen)
    return name, thing, fault


def _parts(thing: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, types.MethodType):
        yield f"{name}.__self__", thing.__self__
    elif isinstance(thing, functools.partial):
        yield from _parts((thing.func, *thing.args, *thing.keywords.values()), name)
    elif isinstance(thing, types.FunctionType):
        for variable, cell in zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # An empty cell.
                yield f"{variable}, which {name} uses", cell.cell_contents
        used = (variable for variable in thing.__code__.co_names if variable in thing.__globals__)
        yield from ((f"{variable}, which {name} uses", thing.__globals__[variable]) for variable in used)
    elif isinstance(thing, dict):
        yield from ((f"{name}[{key!r}]", value) for key, value in thing.items())
    elif isinstance(thing, list | tuple | set):
        yield from ((f"{name}[{number}]", value) for number, value in enumerate(thing))
    elif _is_the_users(thing if isinstance(thing, type) else type(thing)):
        for key, value in list(vars(thing).items()):
            if key in ("_modules", "_parameters", "_buffers"):  # A torch module: name children as the user writes them.
                yield from ((f"{name}.{child}", part) for child, part in value.items())
            elif key not in ("__dict__", "__weakref__"):  # Every class has its own.
                yield f"{name}.{key}", value
        if not isinstance(thing, type):
            yield type(thing).__name__, type(thing)


def _is_the_users(kind: type) -> bool:
    top = kind.__module__.partition(".")[0]
    return top == "__main__" or any(module.__name__ == top for module in _modules_of_the_user())
