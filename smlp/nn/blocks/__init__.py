"""Residual blocks, one file each; every architecture is a stack of them."""

# ruff: noqa: I001  help and messages name blocks in this order
from smlp.nn.blocks.base import AuxLosses, Block, BlockKind, DenseBlock, build_blocks, sparse_block
from smlp.nn.blocks.sparse import SparseBlock, SparseBlockKind
from smlp.nn.blocks.gmlp import GatedMLPBlock, SpatialGatingUnit
from smlp.nn.blocks.smlp import FeatureSublayer
from smlp.nn.blocks.transformer import AttentionSublayer
from smlp.nn.blocks.mixer import TokenMixing
from smlp.nn.blocks.masked import MaskedBlock
from smlp.nn.blocks.gmlp_moe import GatedMLPExperts, GatedMLPMoEBlock

__all__ = [
    "AttentionSublayer",
    "AuxLosses",
    "Block",
    "BlockKind",
    "DenseBlock",
    "FeatureSublayer",
    "GatedMLPBlock",
    "GatedMLPExperts",
    "GatedMLPMoEBlock",
    "MaskedBlock",
    "SparseBlock",
    "SparseBlockKind",
    "SpatialGatingUnit",
    "TokenMixing",
    "build_blocks",
    "sparse_block",
]
