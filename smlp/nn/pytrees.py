"""Dataclasses whose tensors torch has to find.

Wrappers such as ``DistributedDataParallel(static_graph=True)`` and FSDP look for the tensors that a module returns with
``torch.utils._pytree``, which takes a dataclass that it does not know for one thing without any.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, TypeVar

from torch.utils._pytree import GetAttrKey, register_pytree_node

Class = TypeVar("Class", bound=type)


def pytree(cls: Class) -> Class:
    """Class decorator: register a dataclass whose instances torch may take apart and put together again.

    Not for an object through which modules hand something to each other, such as a ``ForwardContext``: what is written
    into the copy that a wrapper makes would be lost.
    """
    names = [field.name for field in dataclasses.fields(cls)]

    def flatten(instance: Any) -> tuple[list[Any], None]:
        return [getattr(instance, name) for name in names], None

    def flatten_with_keys(instance: Any) -> tuple[list[tuple[GetAttrKey, Any]], None]:
        return [(GetAttrKey(name), getattr(instance, name)) for name in names], None

    def unflatten(values: Iterable[Any], _: None) -> Any:
        return cls(*values)

    register_pytree_node(
        cls,
        flatten,
        unflatten,
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
        flatten_with_keys_fn=flatten_with_keys,
    )
    return cls
