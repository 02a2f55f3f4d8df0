"""How routers, blocks and architectures get into the tables of :mod:`smlp.config.registry`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from smlp.config import SETTINGS, all_settings
from smlp.config.own_settings import fields_of, own_fields
from smlp.config.presets import TASK_OPTIONS
from smlp.config.registry import ARCHITECTURES, DENSE_BLOCKS, PACKAGE, ROUTERS, SPARSE_BLOCKS, Registry
from smlp.errors import UserError
from smlp.kinds.block import BlockKind
from smlp.kinds.kind import Kind
from smlp.kinds.router import RouterKind

_K = TypeVar("_K", bound=type[Kind])


def register_router(name: str) -> Callable[[_K], _K]:
    """Class decorator: a :class:`RouterKind` that ``--router NAME`` chooses.

    Raises:
        UserError: the name is taken, the class lacks something, or its settings are none.
    """
    return _decorator(ROUTERS, name, RouterKind)


def register_dense_block(name: str) -> Callable[[_K], _K]:
    """The same for a :class:`BlockKind` and ``--dense-block NAME``."""
    return _decorator(DENSE_BLOCKS, name, BlockKind)


def register_sparse_block(name: str) -> Callable[[_K], _K]:
    """The same for a :class:`BlockKind`, with experts, and ``--sparse-block NAME``."""
    return _decorator(SPARSE_BLOCKS, name, BlockKind)


def register_architecture(name: str, like: str | None = None, **settings: Any) -> None:
    """A named architecture, for ``--arch NAME`` and :func:`smlp.build`.

    Args:
        name: its name.
        like: an architecture whose settings it has, but for those that follow.
        **settings: by name.

    Raises:
        UserError: the name is taken; ``like`` or a setting is unknown.
    """
    if like is not None and like not in ARCHITECTURES:
        raise UserError(f"architecture {name!r} is to be like {like!r}, which there is not")
    for unknown in settings.keys() - all_settings().keys():
        raise UserError(f"architecture {name!r} has an unknown setting {unknown!r}")
    base = {} if like is None else ARCHITECTURES[like]
    ARCHITECTURES.add(name, {**base, **settings}, _file_of(sys._getframe(1).f_globals))


def _decorator(table: Registry, name: str, base: type[Kind]) -> Callable[[_K], _K]:
    def register(kind: _K) -> _K:
        what = f"{table.what} {name!r} ({getattr(kind, '__qualname__', kind)})"
        if not (isinstance(kind, type) and issubclass(kind, base)):
            raise UserError(f"{what} is no {base.__name__}")
        if inspect.isabstract(kind):
            raise UserError(f"{what} lacks {', '.join(sorted(kind.__abstractmethods__))}")
        if kind.settings is not None:
            _check_settings(table, name, kind.settings, what)
        part = kind()
        part.name = name
        table.add(name, part, _place_of(kind))
        return kind

    return register


def _check_settings(table: Registry, name: str, settings: type, what: str) -> None:
    """Refuses settings with the names of others. A dense and a sparse block of one name share theirs."""
    others = own_fields()
    for full in fields_of(name, settings):
        if full in SETTINGS or full in TASK_OPTIONS or (full in others and others[full].metadata["owner"] != name):
            raise UserError(f"{what}: its setting {full!r} has the name of another setting")
    for other in (ROUTERS, DENSE_BLOCKS, SPARSE_BLOCKS):
        theirs = other[name].settings if name in other and other is not table else None
        if theirs is not None and _place_of(theirs) != _place_of(settings):
            raise UserError(f"{what}: the {other.what} of that name has other settings ({_place_of(theirs)})")


def _place_of(kind: type) -> str:
    """A class and the file in which it is; only the name of the package for one of its own."""
    if kind.__module__.startswith(f"{__package__}."):
        return PACKAGE
    return f"{kind.__qualname__} in {_file_of(vars(sys.modules[kind.__module__]))}"


def _file_of(namespace: dict[str, Any]) -> str:
    """Where something is defined, for messages."""
    file = namespace.get("__file__")
    return str(Path(file).resolve()) if file else str(namespace.get("__name__"))
