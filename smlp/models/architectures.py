"""Every preset as a fairseq architecture (``--arch NAME``)."""

from __future__ import annotations

from typing import Any

from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY, register_model_architecture

from smlp.config.presets import FROM_TASK, PRESETS
from smlp.criterions.choice import settle_criterion
from smlp.models import language_model  # noqa: F401  registers the model "smlp" first


def _fill_in(args: Any, arch: str) -> None:
    """Sets the architecture's settings where the command line is silent, and the criterion that it needs."""
    for name, value in PRESETS[arch].items():
        if name not in FROM_TASK and getattr(args, name, None) is None:
            setattr(args, name, value)
    settle_criterion(args, arch)


def _register(arch: str) -> None:
    def fill_in(args: Any) -> None:
        _fill_in(args, arch)

    if arch in ARCH_MODEL_REGISTRY:  # the model's own name, for which fairseq registers an empty function
        ARCH_CONFIG_REGISTRY[arch] = fill_in
    else:
        register_model_architecture("smlp", arch)(fill_in)


for _arch in PRESETS:
    _register(_arch)
