"""Mixtures of experts: routers decide, dispatchers move, experts compute, layers chain them."""
