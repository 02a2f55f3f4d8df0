"""Layers that several blocks share, and the initial values of stacked weights.

Letters: ``B`` sequences, ``n`` tokens, ``T`` context, ``H``, ``F``, ``h`` heads or experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smlp.errors import UserError
from smlp.ops import (
    ACTIVATION_FUNCTIONS,
    causal_spatial_projection,
    dropout,
    linear,
    spatial_projection,
    toeplitz_matrices,
)


class Linear(nn.Linear):
    """torch's layer, faster for the few rows of incremental decoding."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., I) to (..., O)."""
        return linear(x, self.weight, self.bias)


def xavier_linear(in_features: int, out_features: int, bias: bool = True) -> Linear:
    """Return a linear layer with Xavier's uniform weights and zero bias."""
    layer = Linear(in_features, out_features, bias)
    nn.init.xavier_uniform_(layer.weight)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


class MaskedLinear(nn.Module):
    """A linear map ``(M * W) x + b`` with a static random mask M, computed as a dense product.

    Every entry of M is one with probability p, independently, and stays as it is (Hayase and Karakida, 2024, S.16).
    Masked weights start at zero and get no gradient, so that weight decay leaves them at zero. The mask is a buffer: it
    is saved with the weights, and data-parallel training sends rank 0's to all ranks.

    Args:
        in_features, out_features: I, O.
        density: p, in (0, 1].
        bias: whether there is a b.
        allowed: entries that the mask may keep, (O, I) bool on the CPU; all by default. ``self.density`` is then the
            share of all entries that is expected.
    """

    mask: Tensor

    def __init__(
        self, in_features: int, out_features: int, density: float, bias: bool = True, allowed: Tensor | None = None
    ) -> None:
        super().__init__()
        if not 0 < density <= 1:
            raise UserError(f"the density of a masked layer must be above 0 and at most 1, got {density}")
        self.density = density if allowed is None else density * float(allowed.double().mean())
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None
        mask = torch.rand(out_features, in_features) < density
        self.register_buffer("mask", mask if allowed is None else mask & allowed.to(mask.device))
        self.start((self.density * in_features) ** -0.5)

    @torch.no_grad()
    def start(self, deviation: float) -> None:
        """Draw the weights from a normal distribution, and set the masked ones to zero."""
        nn.init.normal_(self.weight, std=deviation)
        self.weight.mul_(self.mask)

    def matrix(self) -> Tensor:
        """Return ``M * W``, (O, I)."""
        return self.weight * self.mask

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., I) to (..., O)."""
        return linear(x, self.matrix(), self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.weight.size(1)}, out_features={self.weight.size(0)}, density={self.density:.4g}"


def _feed_forward_layer(inputs: int, outputs: int, density: float) -> nn.Module:
    """Return a linear layer with Xavier's values, or a masked one whose outputs start with the same variance."""
    if density == 1:
        return xavier_linear(inputs, outputs)
    layer = MaskedLinear(inputs, outputs, density)
    layer.start((2 / (density * (inputs + outputs))) ** 0.5)
    return layer


class FeedForward(nn.Module):
    """``fc2(act(fc1(x)))``, H to F to H.

    Args:
        embed_dim, ffn_dim: H, F.
        activation: "gelu", "relu" or "swish".
        density: below 1, share of the weights that a static mask keeps (:class:`MaskedLinear`).
    """

    def __init__(self, embed_dim: int, ffn_dim: int, activation: str, density: float = 1.0) -> None:
        super().__init__()
        self.fc1 = _feed_forward_layer(embed_dim, ffn_dim, density)
        self.activation = ACTIVATION_FUNCTIONS[activation]
        self.fc2 = _feed_forward_layer(ffn_dim, embed_dim, density)

    def forward(self, x_BnH: Tensor) -> Tensor:
        """Map (B, n, H) to (B, n, H)."""
        return self.fc2(self.activation(self.fc1(x_BnH)))


class Dropout(nn.Module):
    """:func:`smlp.ops.dropout` in training, nothing in evaluation.

    Args:
        probability: of an element to be set to zero.
    """

    #: whether to drop in evaluation too
    is_retained = False

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    @property
    def rate(self) -> float:
        """Return the probability that holds now: 0 in evaluation, unless dropout is retained."""
        return self.probability if self.training or self.is_retained else 0.0

    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, self.rate)

    def make_generation_fast_(
        self,
        name: str = "",
        retain_dropout: bool = False,
        retain_dropout_modules: Iterable[str] | None = None,
        **unused: object,
    ) -> None:
        """Follow ``--retain-dropout`` and ``--retain-dropout-modules``; fairseq calls this before it generates.

        Raises:
            UserError: only the dropout of some modules is to be kept; modules have no names here that could be given.
        """
        if retain_dropout and retain_dropout_modules is not None:
            raise UserError(
                f"--retain-dropout-modules {retain_dropout_modules}: the layers of this model have no such names; "
                "--retain-dropout alone keeps the dropout of all of them"
            )
        self.is_retained = retain_dropout

    def extra_repr(self) -> str:
        return f"probability={self.probability}"


def uniform_rows(ids: Sequence[int], *shape: int, bound: float) -> nn.Parameter:
    """Return a stack of weights (h, ...) from U(-bound, bound), a row for each head or expert.

    Every row has a generator of its own, seeded from one number of the global generator and the row's id, so that its
    values depend neither on the other rows nor on the rank that holds it. They are drawn on the CPU, to be the same on
    every device.

    Args:
        ids: numbers of heads, or global ids of experts.
        *shape: of a row.
        bound: of the values.
    """
    weight = nn.Parameter(torch.empty(len(ids), *shape))
    seed = int(torch.randint(2**62, (), dtype=torch.int64, device="cpu"))
    if not weight.is_meta:
        with torch.no_grad():
            for row, row_id in enumerate(ids):
                generator = torch.Generator().manual_seed((seed + row_id * 0x9E3779B97F4A7C15) % 2**63)
                values = torch.empty(shape, device="cpu").uniform_(-bound, bound, generator=generator)
                weight[row].copy_(values)
    return weight


class SpatialWeights(nn.Module):
    """Weights of spatial projections: a T x T matrix and a bias of length T for each head or expert.

    The weights of a Toeplitz matrix are one number for each distance: (h, 2T-1), or, in a causal model, (h, T) for the
    distances from T-1 positions back to none (Liu et al., 2021, appendix C).

    Args:
        max_tokens: T.
        ids: numbers of the heads, or global ids of the experts.
        weight_bound: weights start as U(-bound, bound), near zero.
        bias_init: initial value of every bias.
        is_causal: whether no position sees a later one.
        is_toeplitz: whether a matrix depends on the distance alone.
        average: multiple of :func:`decaying_average` that is added to the initial weights of a causal model.
        num_all: heads or experts of the layer, over all ranks; by default those of ``ids``.
    """

    def __init__(
        self,
        max_tokens: int,
        ids: Sequence[int],
        weight_bound: float,
        bias_init: float,
        is_causal: bool = True,
        is_toeplitz: bool = False,
        average: float = 0.0,
        num_all: int | None = None,
    ) -> None:
        super().__init__()
        self.max_tokens = max_tokens
        self.is_causal = is_causal
        self.is_toeplitz = is_toeplitz
        shape = (spatial_parameters(max_tokens, is_causal, True),) if is_toeplitz else (max_tokens, max_tokens)
        self.weight = uniform_rows(ids, *shape, bound=weight_bound)
        self.bias = nn.Parameter(torch.full((len(ids), max_tokens), float(bias_init)))
        if average and not self.weight.is_meta:
            start = decaying_average(max_tokens, ids, len(ids) if num_all is None else num_all).flip(1)
            if not is_toeplitz:
                start = toeplitz_matrices(F.pad(start, (0, max_tokens - 1)), max_tokens)
            with torch.no_grad():
                self.weight.add_(start.to(self.weight), alpha=average)

    def matrices(self, num_tokens: int | None = None, only: int | None = None) -> Tensor:
        """Return the leading rows and columns, for n (default T) tokens, of all matrices or of one, (h or 1, n, n).

        Of a causal model, what is above the diagonal has no influence.
        """
        num_tokens = self.max_tokens if num_tokens is None else num_tokens
        weight = self.weight if only is None else self.weight[only : only + 1]
        if not self.is_toeplitz:
            return weight if num_tokens == self.max_tokens else weight[:, :num_tokens, :num_tokens]
        w_hL = F.pad(weight, (0, self.max_tokens - 1)) if self.is_causal else weight
        return toeplitz_matrices(w_hL, num_tokens)

    def project(self, x_Bnhc: Tensor, start: int = 0, gate_Bmhc: Tensor | None = None) -> Tensor:
        """Mix positions 0 .. n-1, chunk i by matrix i: (B, n, h, c) to (B, n - start, h, c), times the gate if any."""
        # a free matrix is returned whole: the product slices it, so that its gradient stays one tensor
        weight_hTT = self.matrices(x_Bnhc.size(1)) if self.is_toeplitz else self.weight
        if self.is_causal:
            return causal_spatial_projection(x_Bnhc, weight_hTT, self.bias, start, gate_Bmhc, self.is_toeplitz)
        return spatial_projection(x_Bnhc, weight_hTT, self.bias, gate_Bmhc)


def decaying_average(max_tokens: int, ids: Sequence[int], num_all: int) -> Tensor:
    """Return the weights of a decaying average by distance, from none to T-1 positions back, (h, T).

    Each row sums to nearly one where the past is long. The half-life of head or expert i of n is
    ``T ** ((i + 0.5) / n)`` positions.
    """
    half_lives = [max_tokens ** ((i + 0.5) / num_all) for i in ids]
    decay_h1 = 2 ** (-1 / torch.tensor(half_lives, dtype=torch.float32, device="cpu").unsqueeze(1))
    return (1 - decay_h1) * decay_h1 ** torch.arange(max_tokens, device="cpu")


def spatial_parameters(max_tokens: int, is_causal: bool, is_toeplitz: bool) -> int:
    """Return how many numbers a matrix over T positions has."""
    if not is_toeplitz:
        return max_tokens * max_tokens
    return max_tokens if is_causal else 2 * max_tokens - 1
