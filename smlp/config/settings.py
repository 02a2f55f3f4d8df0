"""Fields of configurations: documented, with the values that they may take; needs no torch."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Iterable
from typing import Any

from smlp.errors import UserError

#: names of precisions, as users write them and as torch does
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def setting(default: Any, help_text: str, choices: Iterable[Any] | None = None) -> Any:
    """Return a field with its documentation, which command lines show as well, and the values it may take.

    Args:
        default: value if nothing is given.
        help_text: one clause.
        choices: the values; those of a :class:`smlp.config.registry.Registry` are looked up when they are needed.
    """
    return dataclasses.field(default=default, metadata={"help": help_text, "allowed": choices})


def help_of(field: dataclasses.Field[Any]) -> str:
    """Return the documentation of a field, with the values it may take."""
    allowed, text = field.metadata.get("allowed"), field.metadata["help"]
    return text if allowed is None else f"{text}: {', '.join(map(str, allowed))}"


def check_choices(config: Any, prefix: str = "") -> None:
    """Refuse values that are not of their field's type, or not among its choices, and make numbers Python's own.

    Args:
        config: a dataclass with fields made by :func:`setting`.
        prefix: of the field names as a user gives them.

    Raises:
        UserError: the message names the field.
    """
    for field in dataclasses.fields(config):
        check_value(f"{prefix}{field.name}", field, getattr(config, field.name))
        object.__setattr__(config, field.name, as_python(getattr(config, field.name)))  # of a frozen one


def as_python(value: Any) -> Any:
    """Return a number of NumPy's, whose products overflow, as Python's own."""
    return value.item() if isinstance(value, numbers.Real) and hasattr(value, "item") else value


def check_value(name: str, field: dataclasses.Field[Any], value: Any) -> None:
    """Refuse a value that is not of a field's type, or not among its choices, as :func:`check_choices` does.

    Raises:
        UserError: the message starts with ``name``.
    """
    allowed = field.metadata.get("allowed")
    check_type(name, field.type, value)
    if allowed is not None and value not in allowed:
        hint = getattr(allowed, "hint", "")
        raise UserError(f"{name} must be one of {', '.join(map(str, allowed))}, got {value!r:.80}{hint}")


def check_type(name: str, kind: Any, value: Any) -> None:
    """Refuse a value of another type, such as text for a number. ``kind`` is the annotation: a type or its name.

    Raises:
        UserError: the message starts with ``name``.
    """
    kind = kind if isinstance(kind, str) else getattr(kind, "__name__", "")
    wanted = {"int": numbers.Integral, "float": numbers.Real, "str": str, "bool": bool}.get(
        kind.removesuffix(" | None")
    )
    if wanted is None or (value is None and kind.endswith("| None")):
        return
    if not isinstance(value, wanted) or (isinstance(value, bool) and kind != "bool"):
        raise UserError(f"{name} must be of type {kind}, got {value!r:.80}")
    if wanted is numbers.Real and isinstance(value, int) and value.bit_length() > 1023:
        raise UserError(f"{name} is a number of {value.bit_length():,} bits, too large for a {kind}")


def require(condition: bool, message: str) -> None:
    """Raise ``UserError(message)`` unless the condition holds."""
    if not condition:
        raise UserError(message)
