"""Before the first update: imports that take seconds and are not used, and the number of threads."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import types
from collections.abc import Iterator

import torch

from smlp.launch.machine import num_cores


def apply() -> None:
    leave_out_compiler()
    limit_threads()


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


def limit_threads() -> None:
    """Take no more threads than cores: torch knows a process' affinity but not the CPU quota of its container."""
    if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > num_cores():
        torch.set_num_threads(num_cores())


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
