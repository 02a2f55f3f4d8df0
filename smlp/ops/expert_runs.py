"""Products of tokens with the weights of their own experts, for one expert at a time or for many.

On a CPU one large expert after the other is fastest: intermediate results stay in the cache. Many small ones share all
but their products. A GPU wants few, large calls: one batched product where all experts have equally many tokens, one
grouped product where they do not, or, for dtypes without one, a batched product with rows of zeros.

Letters: ``n`` tokens of a run, sorted by expert, ``e`` its experts; ``I`` and ``O`` features in and out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from smlp.ops import onednn
from smlp.ops.fast_paths import (
    TOKENS_AT_A_TIME,
    groups_products,
    pads_experts,
    shares_small_experts,
    takes_bands,
    takes_onednn,
)
from smlp.ops.functional import few_rows

Statistics = tuple[Tensor, Tensor]
_EPSILON = 1e-5  # torch's default for a layer norm


class Run(Protocol):
    """Experts that follow each other, and their tokens."""

    rows: slice
    experts: slice
    #: whether the previous run has the same expert, so that sums over tokens continue
    continues: bool

    def norm(self, x_nI: Tensor, gain_eI: Tensor, offset_eI: Tensor) -> tuple[Tensor, Statistics]:
        """Return the normed tokens (n, I), and their means and reciprocal deviations."""
        ...

    def norm_gradients(
        self, grad_nI: Tensor, x_nI: Tensor, statistics: Statistics, gain_eI: Tensor, offset_eI: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of tokens, gains and offsets."""
        ...

    def product(self, x_nI: Tensor, weight_eOI: Tensor, bias_eO: Tensor, out_nO: Tensor | None = None) -> Tensor:
        """Compute ``W x + b`` in ``out`` or in a new tensor."""
        ...

    def transposed(self, y_nO: Tensor, weight_eOI: Tensor) -> Tensor:
        """Return ``W^T y``, (n, I)."""
        ...

    def outer(self, y_nO: Tensor, x_nI: Tensor, out_eOI: Tensor) -> None:
        """Write each expert's sum of ``y x^T`` to ``out``, or add it where the run continues; zeros without tokens."""
        ...

    def sums(self, y_nO: Tensor) -> Tensor:
        """Return each expert's sum of ``y``, (e, O)."""
        ...


class OneExpert:
    """A single expert, with all its tokens or some."""

    def __init__(self, expert: int, first: int, count: int, continues: bool = False) -> None:
        self.rows, self.experts = slice(first, first + count), slice(expert, expert + 1)
        self.continues = continues

    def norm(self, x_nI: Tensor, gain_eI: Tensor, offset_eI: Tensor) -> tuple[Tensor, Statistics]:
        return _layer_norm(x_nI, gain_eI[0], offset_eI[0])

    def norm_gradients(
        self, grad_nI: Tensor, x_nI: Tensor, statistics: Statistics, gain_eI: Tensor, offset_eI: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _layer_norm_gradients(grad_nI, x_nI, statistics, gain_eI[0], offset_eI[0])

    def product(self, x_nI: Tensor, weight_eOI: Tensor, bias_eO: Tensor, out_nO: Tensor | None = None) -> Tensor:
        weight_OI, bias_O = weight_eOI[0], bias_eO[0]
        if takes_bands(x_nI, weight_OI, bias_O):
            y_nO = few_rows(x_nI, weight_OI, bias_O)
        elif takes_onednn(x_nI.size(0) * weight_OI.numel(), x_nI, weight_OI):
            y_nO = onednn.mapped(x_nI, weight_OI, bias_O)
        else:
            return torch.addmm(bias_O, x_nI, weight_OI.t(), out=out_nO)
        return y_nO if out_nO is None else out_nO.copy_(y_nO)

    def transposed(self, y_nO: Tensor, weight_eOI: Tensor) -> Tensor:
        if takes_onednn(y_nO.size(0) * weight_eOI.numel(), y_nO, weight_eOI):
            return onednn.product(y_nO, weight_eOI[0])
        return y_nO @ weight_eOI[0]

    def outer(self, y_nO: Tensor, x_nI: Tensor, out_eOI: Tensor) -> None:
        out_OI = out_eOI[0]
        if takes_onednn(y_nO.size(0) * out_OI.numel(), y_nO, x_nI):
            sum_OI = onednn.outer(y_nO, x_nI)
            if self.continues:
                out_OI.add_(sum_OI)
            else:
                out_OI.copy_(sum_OI)
        elif self.continues:
            out_OI.addmm_(y_nO.t(), x_nI)
        else:
            torch.mm(y_nO.t(), x_nI, out=out_OI)

    def sums(self, y_nO: Tensor) -> Tensor:
        return y_nO.sum(dim=0, keepdim=True)


class _SeveralExperts(ABC):
    """The part that is the same for any numbers of tokens: one norm, then each token's gain and offset."""

    continues = False

    @abstractmethod
    def rows_of(self, value_eI: Tensor) -> Tensor:
        """Return the value of each token's expert, in the shape of :meth:`stacked` or one that broadcasts to it."""

    @abstractmethod
    def sums(self, y_nO: Tensor) -> Tensor:
        """Return each expert's sum, (e, O)."""

    def stacked(self, x_nI: Tensor) -> Tensor:
        """Return the tokens stacked by expert, where a view can do that; otherwise as they are."""
        return x_nI

    def norm(self, x_nI: Tensor, gain_eI: Tensor, offset_eI: Tensor) -> tuple[Tensor, Statistics]:
        unit_nI, statistics = _layer_norm(x_nI, None, None)
        normed = torch.addcmul(self.rows_of(offset_eI), self.stacked(unit_nI), self.rows_of(gain_eI))
        return normed.view(x_nI.shape), statistics

    def norm_gradients(
        self, grad_nI: Tensor, x_nI: Tensor, statistics: Statistics, gain_eI: Tensor, offset_eI: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        mean_n1, deviation_n1 = statistics
        grad_gain_eI = self.sums(grad_nI * (x_nI - mean_n1) * deviation_n1)
        grad_unit_nI = (self.stacked(grad_nI) * self.rows_of(gain_eI)).view(x_nI.shape)
        grad_x_nI, _, _ = _layer_norm_gradients(grad_unit_nI, x_nI, statistics, None, None)
        return grad_x_nI, grad_gain_eI, self.sums(grad_nI)


class EqualExperts(_SeveralExperts):
    """Several experts with equally many tokens."""

    def __init__(self, num_experts: int, count: int) -> None:
        self.rows, self.experts = slice(0, num_experts * count), slice(0, num_experts)
        self.sizes = (num_experts, count)

    def rows_of(self, value_eI: Tensor) -> Tensor:
        return value_eI.unsqueeze(1)

    def product(self, x_nI: Tensor, weight_eOI: Tensor, bias_eO: Tensor, out_nO: Tensor | None = None) -> Tensor:
        bias_e1O, weight_eIO = self.rows_of(bias_eO), weight_eOI.transpose(1, 2)
        out_enO = None if out_nO is None else self.stacked(out_nO)
        return torch.baddbmm(bias_e1O, self.stacked(x_nI), weight_eIO, out=out_enO).flatten(0, 1)

    def transposed(self, y_nO: Tensor, weight_eOI: Tensor) -> Tensor:
        return torch.bmm(self.stacked(y_nO), weight_eOI).flatten(0, 1)

    def outer(self, y_nO: Tensor, x_nI: Tensor, out_eOI: Tensor) -> None:
        torch.bmm(self.stacked(y_nO).transpose(1, 2), self.stacked(x_nI), out=out_eOI)

    def sums(self, y_nO: Tensor) -> Tensor:
        return self.stacked(y_nO).sum(dim=1)

    def stacked(self, x_nI: Tensor) -> Tensor:
        return x_nI.unflatten(0, self.sizes)


class _AnyCounts(_SeveralExperts):
    """Several experts with any numbers of tokens."""

    def __init__(self, counts: Sequence[int], device: torch.device) -> None:
        self.rows, self.experts = slice(0, sum(counts)), slice(0, len(counts))
        self.counts = list(counts)
        self.counts_e = torch.tensor(self.counts, device=device)
        expert_e = torch.arange(len(counts), device=device)
        self.expert_n = expert_e.repeat_interleave(self.counts_e, output_size=sum(counts))

    def rows_of(self, value_eI: Tensor) -> Tensor:
        return value_eI.index_select(0, self.expert_n)

    def sums(self, y_nO: Tensor) -> Tensor:
        return y_nO.new_zeros(len(self.counts), y_nO.size(1)).index_add_(0, self.expert_n, y_nO)


class UnequalExperts(_AnyCounts):
    """Several experts with any numbers of tokens, in grouped products."""

    def __init__(self, counts: Sequence[int], device: torch.device) -> None:
        super().__init__(counts, device)
        self.ends_e = self.counts_e.cumsum(0).to(torch.int32)
        self.idle = [expert for expert, count in enumerate(counts) if count == 0]
        #: whether it is the expert of the token, (e, n)
        self.is_own_en = torch.arange(len(counts), device=device).unsqueeze(1) == self.expert_n

    def product(self, x_nI: Tensor, weight_eOI: Tensor, bias_eO: Tensor, out_nO: Tensor | None = None) -> Tensor:
        y_nO = F.grouped_mm(x_nI, weight_eOI.transpose(1, 2), offs=self.ends_e)
        return torch.add(y_nO, self.rows_of(bias_eO), out=out_nO)

    def sums(self, y_nO: Tensor) -> Tensor:  # adding row by row takes longer, and rounds 16 bits after each row
        return self.is_own_en.to(y_nO.dtype) @ y_nO

    def transposed(self, y_nO: Tensor, weight_eOI: Tensor) -> Tensor:
        return F.grouped_mm(y_nO, weight_eOI, offs=self.ends_e)

    def outer(self, y_nO: Tensor, x_nI: Tensor, out_eOI: Tensor) -> None:
        out_eOI.copy_(F.grouped_mm(y_nO.t(), x_nI, offs=self.ends_e))
        out_eOI[self.idle] = 0


class SmallExperts(_AnyCounts):
    """Many experts with few tokens each, on a CPU: only the products are computed for one expert at a time."""

    def product(self, x_nI: Tensor, weight_eOI: Tensor, bias_eO: Tensor, out_nO: Tensor | None = None) -> Tensor:
        return self._products(x_nI, weight_eOI.transpose(1, 2), out_nO).add_(self.rows_of(bias_eO))

    def transposed(self, y_nO: Tensor, weight_eOI: Tensor) -> Tensor:
        return self._products(y_nO, weight_eOI)

    def outer(self, y_nO: Tensor, x_nI: Tensor, out_eOI: Tensor) -> None:
        parts = zip(y_nO.t().split(self.counts, dim=1), x_nI.split(self.counts), out_eOI, strict=True)
        for y_Oc, x_cI, out_OI in parts:
            torch.mm(y_Oc, x_cI, out=out_OI)

    def _products(self, x_nI: Tensor, weight_eIO: Tensor, out_nO: Tensor | None = None) -> Tensor:
        if out_nO is None:
            out_nO = x_nI.new_empty(x_nI.size(0), weight_eIO.size(2))
        parts = zip(x_nI.split(self.counts), weight_eIO, out_nO.split(self.counts), strict=True)
        for x_cI, weight_IO, out_cO in parts:
            torch.mm(x_cI, weight_IO, out=out_cO)
        return out_nO


def _layer_norm(x_nI: Tensor, gain_I: Tensor | None, offset_I: Tensor | None) -> tuple[Tensor, Statistics]:
    normed_nI, mean_n1, deviation_n1 = torch.native_layer_norm(x_nI, x_nI.shape[1:], gain_I, offset_I, _EPSILON)
    return normed_nI, (mean_n1, deviation_n1)


def _layer_norm_gradients(
    grad_nI: Tensor, x_nI: Tensor, statistics: Statistics, gain_I: Tensor | None, offset_I: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    wanted = [True, gain_I is not None, gain_I is not None]
    return torch.ops.aten.native_layer_norm_backward(
        grad_nI, x_nI, x_nI.shape[1:], *statistics, gain_I, offset_I, wanted
    )


def padded_rows(counts: Sequence[int], x_AI: Tensor, num_hidden: int) -> tuple[Tensor, int] | None:
    """Return where each token stands if all experts are given equally many, and how many; None for no such padding.

    A GPU computes one batched product with some rows of zeros faster than one product after the other.
    """
    if not pads_experts(counts, x_AI, num_hidden):
        return None
    most, device = max(counts), x_AI.device
    counts_e = torch.tensor(counts, device=device)
    shift_e = torch.arange(len(counts), device=device) * most - (counts_e.cumsum(0) - counts_e)
    shift_A = shift_e.repeat_interleave(counts_e, output_size=len(x_AI))
    return torch.arange(len(x_AI), device=device) + shift_A, most


def runs(counts: Sequence[int], x_AI: Tensor, num_hidden: int) -> Iterator[Run]:
    """Yield all experts, ``counts[i]`` tokens at expert i, in as many runs as suit the device and the sizes."""
    if x_AI.is_cuda and all(count == counts[0] for count in counts):
        yield EqualExperts(len(counts), counts[0])
    elif groups_products(x_AI, num_hidden):
        yield UnequalExperts(counts, x_AI.device)
    elif shares_small_experts(counts, x_AI, num_hidden):
        yield SmallExperts(counts, x_AI.device)
    else:
        first = 0
        for expert, count in enumerate(counts):
            for done in range(0, max(count, 1), TOKENS_AT_A_TIME):  # once where there are none
                yield OneExpert(expert, first + done, min(count - done, TOKENS_AT_A_TIME), continues=done > 0)
            first += count
