"""The configuration of models: settings and their limits, named architectures, and what plug-ins add to them."""

from smlp.config.model import (
    LEAKY_WARNING,
    MOST_LAYERS,
    SETTINGS,
    ModelConfig,
    MoEConfig,
    all_settings,
    differences,
    flatten,
    lost_settings,
    unflatten,
)

__all__ = [
    "LEAKY_WARNING",
    "MOST_LAYERS",
    "SETTINGS",
    "MoEConfig",
    "ModelConfig",
    "all_settings",
    "differences",
    "flatten",
    "lost_settings",
    "unflatten",
]
