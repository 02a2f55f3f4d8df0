"""Products of a matrix with few vectors, as one batched product of bands of its rows, for CPUs.

Such a product reads each number of the matrix once and is bound by memory. Taken whole it leaves one of two cores idle
and half of the other's bandwidth unused; bands use both.

Letters: ``N`` vectors, ``O`` rows and ``I`` columns of the matrix, ``k`` bands, which divide O.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rows_by_bands(matrix_OI: Tensor, x_NI: Tensor, bands: int, bias_O: Tensor | None = None) -> Tensor:
    """``W x + b`` for each vector, (O, N): every band gives its rows of the result."""
    matrix_kOI = matrix_OI.unflatten(0, (bands, -1))
    # vectors as columns that lie one after the other: otherwise it is no faster than the whole product
    x_kIN = x_NI.unsqueeze(0).expand(bands, -1, -1).transpose(1, 2)
    if bias_O is None:
        out_kON = torch.bmm(matrix_kOI, x_kIN)
    else:
        out_kON = torch.baddbmm(bias_O.view(bands, -1, 1), matrix_kOI, x_kIN)
    return out_kON.flatten(0, 1)


def columns_by_bands(matrix_OI: Tensor, y_O: Tensor, bands: int) -> Tensor:
    """``W^T y``, (1, I): every band gives its share of each sum."""
    return torch.bmm(y_O.view(bands, 1, -1), matrix_OI.unflatten(0, (bands, -1))).sum(dim=0)
