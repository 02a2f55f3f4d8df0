"""Routers: each is a pure function from logits to a plan, and a module that holds the weights."""

from smlp.moe.routers.balanced import BalancedRouter
from smlp.moe.routers.features import FeatureRouter
from smlp.moe.routers.hashed import HashRouter
from smlp.moe.routers.routing import Router, RouterWithPlaces, Routing
from smlp.moe.routers.top_k import TopKRouter, TopKSettings

__all__ = [
    "BalancedRouter",
    "FeatureRouter",
    "HashRouter",
    "Router",
    "RouterWithPlaces",
    "Routing",
    "TopKRouter",
    "TopKSettings",
]
