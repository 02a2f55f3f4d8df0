"""Imports that take seconds and are not used: half of the time from the command to the first update."""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from collections.abc import Iterator

import torch


def apply() -> None:
    leave_out_compiler()


def leave_out_compiler() -> None:
    """Keep torch's optimizers from importing the compiler (3 s) for the sake of not being compiled.

    These methods go through a wrapper that imports ``torch._dynamo`` at the first call, to ask it for a version that
    it leaves alone, and keeps the answer on the function. Where the compiler was not imported there is nothing to be
    left alone by, and the answer is the function itself.
    """
    if "torch._dynamo" in sys.modules:
        return
    for name in ("add_param_group", "state_dict", "load_state_dict", "zero_grad"):
        function = getattr(getattr(torch.optim.Optimizer, name, None), "__wrapped__", None)
        if function is not None:
            function.__dynamo_disable = function


class _Later(types.ModuleType):
    """Stands for a module: its functions import it when they are called."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):  # what the import system asks
            raise AttributeError(name)
        return lambda *args, **kwargs: getattr(importlib.import_module(self.__name__), name)(*args, **kwargs)


@contextlib.contextmanager
def without_statistics() -> Iterator[None]:
    """Inside the block, functions of sklearn.metrics and scipy.stats are imported without their modules.

    ``import fairseq`` asks for a few of them, for tasks of classification, which takes 2 s. What is imported in the
    block stays usable after it; a module that is there already is used as it is.
    """
    added: dict[str, types.ModuleType] = {}
    if "sklearn" not in sys.modules:
        added["sklearn"], added["sklearn.metrics"] = _Later("sklearn"), _Later("sklearn.metrics")
        added["sklearn"].metrics = added["sklearn.metrics"]
    if "scipy.stats" not in sys.modules:
        added["scipy.stats"] = _Later("scipy.stats")
    sys.modules.update(added)
    try:
        yield
    finally:
        for name, module in added.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
