"""Settings that routers and blocks define; each is an option ``NAME_FIELD`` of the command line. Needs no torch."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Mapping
from typing import Any

from smlp.config.registry import DENSE_BLOCKS, ROUTERS, SPARSE_BLOCKS
from smlp.config.settings import check_value
from smlp.errors import UserError

_TYPES = {int: "int", float: "float", bool: "bool", str: "str"}


@functools.cache
def fields_of(name: str, settings: type) -> dict[str, dataclasses.Field[Any]]:
    """Return the settings of a part as fields, under the names that a user gives.

    Args:
        name: of the part.
        settings: a frozen dataclass whose fields :func:`smlp.config.settings.setting` made.

    Raises:
        UserError: ``settings`` is not such a dataclass.
    """
    is_class = isinstance(settings, type) and dataclasses.is_dataclass(settings)
    if not (is_class and typing.cast(Any, settings).__dataclass_params__.frozen):
        shown = getattr(settings, "__qualname__", settings)
        raise UserError(f"the settings of {name!r} ({shown}) are not a frozen dataclass")
    types, fields = typing.get_type_hints(settings), {}
    for field in dataclasses.fields(settings):
        kind, where = types[field.name], f"setting {field.name!r} of {name!r}"
        if kind not in _TYPES:
            raise UserError(f"{where} has type {kind}; it must be int, float, bool or str")
        if "help" not in field.metadata:
            raise UserError(f"{where} was not made with smlp.extend.setting(default, help)")
        if kind is bool and field.default is not False:
            raise UserError(f"{where} is true by default; it must be false, because an option can only switch it on")
        full: Any = dataclasses.field(default=field.default, metadata={**field.metadata, "owner": name})
        full.name, full.type = f"{name}_{field.name}", _TYPES[kind]
        check_value(full.name, full, field.default)
        fields[full.name] = full
    return fields


def own_fields() -> dict[str, dataclasses.Field[Any]]:
    """Return the settings of all registered parts, by name; ``metadata["owner"]`` is the part's name."""
    fields: dict[str, dataclasses.Field[Any]] = {}
    for table in (ROUTERS, DENSE_BLOCKS, SPARSE_BLOCKS):
        for name, kind in table.items():
            if kind.settings is not None:
                fields |= fields_of(name, kind.settings)
    return fields


def own_object(name: str, values: Mapping[str, Any]) -> Any:
    """Return the settings of a part as an object of its class.

    Args:
        name: of the part.
        values: by the names that a user gives; missing ones take their defaults.

    Raises:
        UserError: the part has no settings, or a value is not among the choices or is refused by the class itself.
    """
    # a dense and a sparse block of one name share their settings
    found = (table[name].settings for table in (ROUTERS, DENSE_BLOCKS, SPARSE_BLOCKS) if name in table)
    settings_class, prefix = next((settings for settings in found if settings is not None), None), f"{name}_"
    if settings_class is None:
        raise UserError(f"no router or block {name!r} has settings of its own")
    own = {}
    for full, field in fields_of(name, settings_class).items():
        own[full.removeprefix(prefix)] = value = values.get(full, field.default)
        check_value(full, field, value)  # before the class's own checks, which compare numbers
    return settings_class(**own)
