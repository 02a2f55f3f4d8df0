"""Weights between timm's models and ours, and at other resolutions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

_TIMMS = re.compile(r"\.gate\.proj\.(weight|bias)$")
_OURS = re.compile(r"\.gate\.heads\.(weight|bias)$")


def from_timm(state: Mapping[str, Tensor], model: Any = None) -> dict[str, Tensor]:
    """Return the weights of timm's ``mixer_*`` and ``gmlp_*`` models under our names; our own stay as they are.

    Only those of a spatial gating unit differ: ours has an axis of heads.

    Args:
        state: of ``timm.create_model("gmlp_s16_224")``, for example.
        model: unused; timm passes it.
    """
    return {
        _TIMMS.sub(r".gate.heads.\1", name): tensor.unsqueeze(0) if _TIMMS.search(name) else tensor
        for name, tensor in state.items()
    }


def to_timm(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return our weights under the names of timm's ``mixer_*`` and ``gmlp_*`` models."""
    return {
        _OURS.sub(r".gate.proj.\1", name): tensor.squeeze(0) if _OURS.search(name) else tensor
        for name, tensor in state.items()
    }
