"""Register routers, blocks and architectures in the tables of :mod:`smlp.config.registry`.

:func:`register` checks a part and enters it. ``register_router``, ``register_dense_block`` and
``register_sparse_block``, which users call (:mod:`smlp.extend`), are defined next to the base classes they require.
"""

from __future__ import annotations

import inspect
import sys
from abc import ABC
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from smlp.config.model import SETTINGS, ModelConfig, all_settings
from smlp.config.own_settings import fields_of, own_fields
from smlp.config.presets import RUN_OPTIONS, TASK_OPTIONS
from smlp.config.registry import ARCHITECTURES, DENSE_BLOCKS, PACKAGE, ROUTERS, SPARSE_BLOCKS, Registry
from smlp.config.settings import check_type
from smlp.errors import UserError


class ModelPart(ABC):
    """A part that a model can be made of. Register a subclass under a name; it is instantiated without arguments."""

    #: name under which it is registered
    name: ClassVar[str]
    #: frozen dataclass of the settings that it defines, made with :func:`smlp.extend.setting`; a field F is the
    #: model's setting ``NAME_F`` and fairseq's option ``--NAME-F``; ``config.own(NAME)`` returns the object
    settings: ClassVar[type | None] = None

    def check(self, config: ModelConfig) -> None:  # noqa: B027  most parts refuse nothing
        """Refuse a model whose settings do not fit this part.

        Raises:
            UserError: one sentence that names the settings and the numbers.
        """

    def auxiliary_loss(self, config: ModelConfig) -> str | None:
        """Name the auxiliary losses that the part returns in training, for a message; None if there are none."""
        return None


_K = TypeVar("_K", bound=type[ModelPart])


def register(table: Registry[Any], name: str, base: type[ModelPart]) -> Callable[[_K], _K]:
    """Return a class decorator that checks a subclass of ``base`` and enters an instance of it into a table.

    Raises:
        UserError: the name is taken, the class lacks an abstract method, a method takes other arguments than that of
            ``base``, or its settings cannot be used.
    """

    def enter(kind: _K) -> _K:
        what = f"{table.what} {name!r} ({getattr(kind, '__qualname__', kind)})"
        if not (isinstance(kind, type) and issubclass(kind, base)):
            raise UserError(f"{what} is not a subclass of {base.__name__}")
        if inspect.isabstract(kind):
            raise UserError(f"{what} lacks {', '.join(sorted(kind.__abstractmethods__))}")
        if kind.settings is not None:
            _check_settings(table, name, kind.settings, what)
        part = kind()
        for like in (each for each in kind.__mro__[1:] if issubclass(each, ModelPart)):
            for method, function in vars(like).items():
                if inspect.isfunction(function) and not method.startswith("_"):
                    problem = call_problem(getattr(part, method), *list(inspect.signature(function).parameters)[1:])
                    if problem is not None:
                        raise UserError(f"{what}: {method}() {problem}")
        part.name = name  # type: ignore[misc]  # a class may be registered several times
        table.add(name, part, _origin_of(kind))
        return kind

    return enter


def call_problem(function: Any, *names: str) -> str | None:
    """Return why a function cannot be called with these arguments, in order, as the end of a sentence; None if it can.

    A module is asked for its ``forward``.
    """
    function = getattr(function, "forward", function)
    if getattr(function, "__name__", "") == "_forward_unimplemented":  # torch's, which takes anything and fails
        return "has no forward()"
    try:
        inspect.signature(function).bind(*names)
    except TypeError as error:
        return f"cannot be called with ({', '.join(names)}): {error}"
    return None


def register_architecture(name: str, like: str | None = None, **settings: Any) -> None:
    """Give settings a name, for ``--arch NAME`` and :func:`smlp.build`.

    Args:
        name: its name.
        like: an architecture whose settings it has, except for those that follow.
        **settings: by name.

    Raises:
        UserError: the name is taken; ``like`` or a setting is unknown, or a value is of another type.
    """
    if like is not None and like not in ARCHITECTURES:
        raise UserError(f"architecture {name!r} builds on {like!r}, which does not exist")
    known = all_settings()
    for setting, value in settings.items():
        if setting not in known:
            raise UserError(f"architecture {name!r} has an unknown setting {setting!r}")
        check_type(f"architecture {name!r}: {setting}", known[setting].type, value)
    base = {} if like is None else ARCHITECTURES[like]
    ARCHITECTURES.add(name, {**base, **settings}, _file_of(sys._getframe(1).f_globals))


def _check_settings(table: Registry[Any], name: str, settings: type, what: str) -> None:
    """Refuse settings whose names are taken. A dense and a sparse block of the same name share their settings."""
    others, taken = own_fields(), {*SETTINGS, *TASK_OPTIONS, *RUN_OPTIONS}
    for full in fields_of(name, settings):
        if full in taken or (full in others and others[full].metadata["owner"] != name):
            raise UserError(f"{what}: its setting {full!r} has the same name as another setting")
    for other in (ROUTERS, DENSE_BLOCKS, SPARSE_BLOCKS):
        theirs = other[name].settings if name in other and other is not table else None
        if theirs is not None and _origin_of(theirs) != _origin_of(settings):
            raise UserError(f"{what}: the {other.what} of that name has other settings ({_origin_of(theirs)})")


def _origin_of(kind: type) -> str:
    """Return the name of a class and its file; for the package's own classes, only the package's name."""
    if kind.__module__.startswith(f"{PACKAGE}."):
        return PACKAGE
    return f"{kind.__qualname__} in {_file_of(vars(sys.modules[kind.__module__]))}"


def _file_of(namespace: dict[str, Any]) -> str:
    """Return where something is defined, for messages."""
    file = namespace.get("__file__")
    return str(Path(file).resolve()) if file else str(namespace.get("__name__"))
