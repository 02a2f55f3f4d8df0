"""Kinds of routers and blocks: what the package has to know of each beside its module; docs/extending.md.

Importing this registers the built-in ones. It needs no torch: modules are imported when they are built.
"""

from smlp.config.settings import setting
from smlp.kinds import blocks, routers
from smlp.kinds.block import BlockKind, SparseBlockKind
from smlp.kinds.registration import (
    register_architecture,
    register_dense_block,
    register_router,
    register_sparse_block,
)
from smlp.kinds.router import RouterKind

__all__ = [
    "BlockKind",
    "RouterKind",
    "SparseBlockKind",
    "blocks",
    "register_architecture",
    "register_dense_block",
    "register_router",
    "register_sparse_block",
    "routers",
    "setting",
]
