"""Places at experts in evaluation, where a trained model is to be scored with another number of them."""

from __future__ import annotations

import dataclasses

from smlp.moe.routers import TopKRouter
from smlp.nn.decoder import Decoder


def routers_with_places(decoder: Decoder) -> list[TopKRouter]:
    """The routers that can drop tokens; none in models where every token finds its expert."""
    return [module for module in decoder.modules() if isinstance(module, TopKRouter)]


def limit_places(decoder: Decoder, factor: float) -> None:
    """Sets the capacity factor of evaluation in place; 0 drops nothing."""
    for router in routers_with_places(decoder):
        router.settings = dataclasses.replace(router.settings, eval_capacity_factor=factor)


def drop_nothing(decoder: Decoder) -> None:
    """Lets experts take every token in evaluation, whatever a model was trained with: a score must not depend on what
    else is in a batch."""
    limit_places(decoder, 0.0)
