"""Places at experts in evaluation, where a trained model is to be scored with another number of them."""

from __future__ import annotations

from smlp.moe.layer import TokenMoE
from smlp.moe.routers import RouterWithPlaces
from smlp.nn.decoder import Decoder


def routers_with_places(decoder: Decoder) -> list[RouterWithPlaces]:
    """The routers that can drop tokens; none in models where every token finds its expert."""
    routers = [module.router for module in decoder.modules() if isinstance(module, TokenMoE)]
    return [router for router in routers if isinstance(router, RouterWithPlaces)]


def limit_places(decoder: Decoder, factor: float) -> None:
    """Sets the capacity factor of evaluation in place; 0 drops nothing."""
    for router in routers_with_places(decoder):
        router.limit_places(factor)


def drop_nothing(decoder: Decoder) -> None:
    """Lets experts take every token in evaluation, whatever a model was trained with: a score must not depend on what
    else is in a batch."""
    limit_places(decoder, 0.0)
