"""Put a function in the place of one of fairseq's or torch's."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


def replacing(owner: Any, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that puts a function in the place of ``owner.name``, a function or a method of any kind.

    The new function gets the one that it replaces, followed by the arguments.
    """

    def put(function: Callable[..., Any]) -> Callable[..., Any]:
        found = inspect.getattr_static(owner, name)
        kind = type(found) if isinstance(found, classmethod | staticmethod) else None
        original = found if kind is None else found.__func__

        @functools.wraps(original)
        def instead(*args: Any, **kw: Any) -> Any:
            return function(original, *args, **kw)

        setattr(owner, name, instead if kind is None else kind(instead))
        return instead

    return put
