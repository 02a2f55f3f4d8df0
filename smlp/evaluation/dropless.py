"""Scoring without a capacity: a score must not depend on what else is in a batch."""

from __future__ import annotations

import dataclasses

from smlp.moe.routers import TopKRouter
from smlp.nn.decoder import Decoder


def drop_nothing(decoder: Decoder) -> None:
    """Lets experts take every token in evaluation, whatever ``eval_capacity_factor`` a model was trained with."""
    for module in decoder.modules():
        if isinstance(module, TopKRouter):
            module.settings = dataclasses.replace(module.settings, eval_capacity_factor=0.0)
