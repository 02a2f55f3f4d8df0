"""Structured linear maps: permutations, Kronecker products, Monarch matrices, and permuted Kronecker (PK) layers.

Each is computed without its matrix; ``matrix()`` returns that matrix, for checks and pictures. A matrix X of shape
(S, C) is vectorised row by row here: ``vec(X)[s * C + c] = X[s, c]``. The paper does it column by column in its section
3 and row by row in its appendix A.2.3; row by row, ``vec(W X V) = (W kron V^T) vec(X)``.

Letters: ``S`` rows, ``C`` columns, ``m`` = S*C.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def commutation(rows: int, columns: int) -> Tensor:
    """Return J_c as an index, (m,): ``vec(X)[index] = vec(X^T)`` for X of shape (rows, columns) (equation 9)."""
    return torch.arange(rows * columns).view(rows, columns).t().reshape(-1)


def permutation_matrix(index_m: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the matrix J, (m, m), with ``J x = x[index]``."""
    return torch.eye(len(index_m), dtype=dtype, device=index_m.device)[index_m]


class Permutation(nn.Module):
    """A fixed permutation of all entries of a matrix: ``Mat(J vec(X))``. It is saved with the weights.

    Args:
        index_m: where each entry comes from.
    """

    index: Tensor

    def __init__(self, index_m: Tensor) -> None:
        super().__init__()
        self.register_buffer("index", index_m)

    @classmethod
    def random(cls, size: int) -> Permutation:
        """Return a uniformly random permutation of ``size`` entries."""
        return cls(torch.randperm(size))

    def forward(self, x_BSC: Tensor) -> Tensor:
        """Map (B, S, C) to (B, S, C)."""
        return x_BSC.flatten(1).index_select(1, self.index).view(x_BSC.shape)

    def extra_repr(self) -> str:
        return f"size={len(self.index)}"


class KroneckerLinear(nn.Module):
    """``W X V`` for X of shape (S, C): a layer of width m whose matrix is ``W kron V^T`` (equation 6).

    Args:
        rows, columns: S, C.
    """

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.left = _normal(rows, rows)
        self.right = _normal(columns, columns)

    def matrix(self) -> Tensor:
        """Return the matrix, (m, m)."""
        return torch.kron(self.left, self.right.t().contiguous())

    def forward(self, x_Bm: Tensor) -> Tensor:
        """Map (B, m) to (B, m)."""
        x_BSC = x_Bm.unflatten(1, (self.left.size(0), -1))
        return (self.left @ x_BSC @ self.right).flatten(1)


class MonarchLinear(nn.Module):
    """A Monarch matrix ``J_c^T L J_c R``, with R of S blocks of size C x C and L of C blocks of S x S (equation 12).

    With equal blocks it is a :class:`KroneckerLinear` (corollary 3.4).

    Args:
        rows, columns: S, C; Dao et al. (2022) take both as the square root of the width.
    """

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.right = _normal(rows, columns, columns)
        self.left = _normal(columns, rows, rows)

    def matrix(self) -> Tensor:
        """Return the matrix, (m, m)."""
        order = permutation_matrix(commutation(self.right.size(0), self.left.size(0)), self.right.dtype)
        return order.t() @ torch.block_diag(*self.left) @ order @ torch.block_diag(*self.right)

    def forward(self, x_Bm: Tensor) -> Tensor:
        """Map (B, m) to (B, m)."""
        x_BSC = x_Bm.unflatten(1, (self.right.size(0), -1))
        x_BSC = torch.einsum("sdc,bsc->bsd", self.right, x_BSC)
        return torch.einsum("cts,bsc->btc", self.left, x_BSC).flatten(1)


class PermutedKronecker(nn.Module):
    """A PK layer without its activation: ``J2 (I kron W) J1 x`` (definition 5.1, equation 19).

    The S-Mixer mixes tokens with ``J1 = J_c``, ``J2 = J_c^T`` and channels with ``J1 = J2 = I`` (S.11, S.12); in an
    RP-Mixer both are random.

    Args:
        blocks: number of copies of W.
        size: of W, (size, size).
        first_m, second_m: J1 and J2 as indices.
    """

    def __init__(self, blocks: int, size: int, first_m: Tensor, second_m: Tensor) -> None:
        super().__init__()
        self.blocks = blocks
        self.weight = _normal(size, size)
        self.first, self.second = Permutation(first_m), Permutation(second_m)

    def matrix(self) -> Tensor:
        """Return the matrix, (m, m)."""
        first, second = (permutation_matrix(one.index, self.weight.dtype) for one in (self.first, self.second))
        return second @ torch.block_diag(*[self.weight] * self.blocks) @ first

    def forward(self, x_Bm: Tensor) -> Tensor:
        """Map (B, m) to (B, m)."""
        x_Bbs = self.first(x_Bm).unflatten(1, (self.blocks, -1))
        return self.second((x_Bbs @ self.weight.t()).flatten(1))


def _normal(*shape: int) -> nn.Parameter:
    """Return weights from a normal distribution whose variance is one over the number of inputs."""
    return nn.Parameter(torch.randn(shape) * shape[-1] ** -0.5)
