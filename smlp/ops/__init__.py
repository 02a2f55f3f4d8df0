"""Functions on tensors, each with a slow and obvious reference in the tests; no parameters, no state."""

from smlp.ops.assignment import balanced_assignment, balanced_assignments
from smlp.ops.fast_paths import reference_ops
from smlp.ops.feed_forward import expert_feed_forward
from smlp.ops.functional import ACTIVATION_FUNCTIONS, activated_halves, dropout, linear, token_linear
from smlp.ops.losses import token_losses
from smlp.ops.rows import permuted_columns, permuted_rows, summed_rows
from smlp.ops.spatial import causal_spatial_projection, spatial_projection, toeplitz_matrices

__all__ = [
    "ACTIVATION_FUNCTIONS",
    "activated_halves",
    "balanced_assignment",
    "balanced_assignments",
    "causal_spatial_projection",
    "dropout",
    "expert_feed_forward",
    "linear",
    "permuted_columns",
    "permuted_rows",
    "reference_ops",
    "spatial_projection",
    "summed_rows",
    "toeplitz_matrices",
    "token_linear",
    "token_losses",
]
