"""Kernels that show what parts of the package's kernels compute; importing this imports Triton."""

import triton
import triton.language as tl

from smlp.ops.triton_kernels import _lower_tile


@triton.jit
def places_of_tiles(numbers, rows, columns, COUNT: tl.constexpr):
    """Row and column of each numbered tile."""
    lanes = tl.arange(0, COUNT)
    row, column = _lower_tile(tl.load(numbers + lanes))
    tl.store(rows + lanes, row)
    tl.store(columns + lanes, column)
