"""Routers, one file each with the plan from scores, the module, and the router's description to the package."""

# ruff: noqa: I001  help and messages name routers in this order
from smlp.moe.routers.routing import Router, RouterKind, Routing, TrainedRouter, register_router
from smlp.moe.routers.offsets import ExpertOffsets
from smlp.moe.routers.balanced import BalancedRouter
from smlp.moe.routers.top_k import TopKRouter, TopKSettings
from smlp.moe.routers.hashed import HashRouter
from smlp.moe.routers.loss_free import LossFreeRouter
from smlp.moe.routers.features import FeatureRouter

__all__ = [
    "BalancedRouter",
    "ExpertOffsets",
    "FeatureRouter",
    "HashRouter",
    "LossFreeRouter",
    "Router",
    "RouterKind",
    "Routing",
    "TopKRouter",
    "TopKSettings",
    "TrainedRouter",
    "register_router",
]
