"""Routers: each is a pure function from logits to a plan, and a module that holds the weights."""

from smlp.moe.routers.balanced import BalancedRouter
from smlp.moe.routers.routing import Router, Routing

__all__ = ["BalancedRouter", "Router", "Routing"]
