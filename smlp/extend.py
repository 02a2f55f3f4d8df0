"""Everything that you need to write a router or a block of your own (docs/extending.md)."""

from smlp.config import ModelConfig
from smlp.config.registration import register_architecture
from smlp.config.settings import setting
from smlp.costs.component import (
    LAYER_NORM_FLOPS,
    NORMS,
    PROJECTIONS,
    ROUTER,
    SCORES,
    SPATIAL,
    Component,
    linear_parameters,
)
from smlp.errors import UserError
from smlp.moe.plan import RoutingPlan
from smlp.moe.routers import ExpertOffsets, TrainedRouter
from smlp.moe.routers.routing import RouterKind, Routing, gate_logits, register_router
from smlp.nn.blocks.base import (
    Block,
    BlockKind,
    DenseBlock,
    feed_forward_costs,
    feed_forward_keeps,
    register_dense_block,
    register_sparse_block,
)
from smlp.nn.blocks.sparse import SparseBlockKind
from smlp.nn.layers import Dropout
from smlp.nn.state import ForwardContext
from smlp.ops.assignment import check_no_nan
from smlp.parallel import Ranks

__all__ = [
    "LAYER_NORM_FLOPS",
    "NORMS",
    "PROJECTIONS",
    "ROUTER",
    "SCORES",
    "SPATIAL",
    "Block",
    "BlockKind",
    "Component",
    "DenseBlock",
    "Dropout",
    "ExpertOffsets",
    "ForwardContext",
    "ModelConfig",
    "Ranks",
    "RouterKind",
    "Routing",
    "RoutingPlan",
    "SparseBlockKind",
    "TrainedRouter",
    "UserError",
    "check_no_nan",
    "feed_forward_costs",
    "feed_forward_keeps",
    "gate_logits",
    "linear_parameters",
    "register_architecture",
    "register_dense_block",
    "register_router",
    "register_sparse_block",
    "setting",
]
