"""Feed-forward networks of many experts, each over its own run of tokens, with gradients by hand.

The backward pass keeps the input, and the input of the activation. The gradients of the weights are written once, to
their final place and layout: autograd makes them transposed and copies them.

Letters: ``A`` routed tokens sorted by expert, ``e`` experts on this rank, ``n`` tokens of a run, ``H``, ``F``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from smlp.errors import UserError
from smlp.ops.expert_runs import Run, padded_rows, runs
from smlp.ops.fast_paths import add_operator, allowed, first_order_only
from smlp.ops.functional import ACTIVATION_FUNCTIONS, activation_gradient


def expert_feed_forward(
    x_AH: Tensor,
    counts: Sequence[int] | Tensor,
    norm: tuple[Tensor, Tensor] | None,
    w1_eFH: Tensor,
    b1_eF: Tensor,
    w2_eHF: Tensor,
    b2_eH: Tensor,
    activation: str = "gelu",
) -> Tensor:
    """Return ``w2 @ act(w1 @ LN(x) + b1) + b2`` with each token's own expert, the norm included.

    Args:
        x_AH: tokens sorted by expert, (A, H).
        counts: tokens of each expert, in order; their sum is A and zeros are allowed. A tensor (e,) in a graph of
            ``torch.compile``, which does not know its values.
        norm: weight and bias of each expert's layer norm, each (e, H); None leaves out the norm.
        w1_eFH, b1_eF, w2_eHF, b2_eH: stacked weights, (e, F, H), (e, F), (e, H, F), (e, H).
        activation: a key of ``ACTIVATION_FUNCTIONS``.

    Returns:
        (A, H), in the order of ``x_AH``. Experts without tokens get zero gradients, never none.

    Raises:
        UserError: there are not as many ``counts`` as experts, their sum is not A, or one is negative.
    """
    weights = (w1_eFH, b1_eF, w2_eHF, b2_eH)
    if isinstance(counts, Tensor):
        return torch.ops.smlp.expert_feed_forward(x_AH, counts, *(norm or (None, None)), *weights, activation)[0]
    _check_counts(counts, x_AH, len(w1_eFH))
    if allowed(x_AH, *(norm or ()), *weights):
        padded = padded_rows(counts, x_AH, w1_eFH.size(1))
        if padded is not None:
            place_A, most = padded
            counts = [most] * len(counts)
            x_AH = x_AH.new_zeros(sum(counts), x_AH.size(1)).index_copy(0, place_A, x_AH)
        out_AH = FusedExperts.apply(counts, x_AH, *(norm or (None, None)), *weights, activation)
        return out_AH if padded is None else out_AH.index_select(0, place_A)
    act, outputs = ACTIVATION_FUNCTIONS[activation], []
    for expert, x_nH in enumerate(x_AH.split(list(counts))):
        if norm is not None:
            gain_eH, offset_eH = norm
            x_nH = F.layer_norm(x_nH, x_nH.shape[1:], gain_eH[expert], offset_eH[expert])
        w1, b1, w2, b2 = (value[expert] for value in weights)
        outputs.append(F.linear(act(F.linear(x_nH, w1, b1)), w2, b2))
    return torch.cat(outputs)


def _check_counts(counts: Sequence[int], x_AH: Tensor, num_experts: int) -> None:
    if torch.compiler.is_compiling():  # it would fix the sizes of a graph
        return
    if len(counts) != num_experts:
        raise UserError(f"counts are of {len(counts)} experts, but the weights of {num_experts}")
    if min(counts, default=0) < 0:
        raise UserError(f"counts hold {min(counts)}, which is no number of tokens")
    if sum(counts) != len(x_AH):
        raise UserError(f"counts are {sum(counts)} tokens together, but x_AH has {len(x_AH)}")


class FusedExperts(torch.autograd.Function):
    """``w2 @ act(w1 @ LN(x) + b1) + b2``: counts, then the inputs of :func:`_outputs`."""

    @staticmethod
    def forward(ctx: Any, counts: Sequence[int], *inputs: Any) -> Tensor:
        x_AH, gain_eH, offset_eH, w1_eFH, _, w2_eHF, _, ctx.activation = inputs
        ctx.runs = list(runs(counts, x_AH, w1_eFH.size(1)))
        out_AH, hidden = _outputs(ctx.runs, *inputs)
        ctx.save_for_backward(x_AH, gain_eH, offset_eH, w1_eFH, w2_eHF, *hidden)
        return out_AH

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad_AH: Tensor) -> tuple[Tensor | None, ...]:
        x_AH, gain_eH, offset_eH, w1_eFH, w2_eHF, *hidden = ctx.saved_tensors
        saved = (x_AH, gain_eH, offset_eH, w1_eFH, w2_eHF)
        return (None, *_gradients(ctx.runs, grad_AH, *saved, hidden, ctx.activation), None)


def _outputs(
    parts: Sequence[Run],
    x_AH: Tensor,
    gain_eH: Tensor | None,
    offset_eH: Tensor | None,
    w1_eFH: Tensor,
    b1_eF: Tensor,
    w2_eHF: Tensor,
    b2_eH: Tensor,
    activation: str,
) -> tuple[Tensor, list[Tensor]]:
    """Return the outputs (A, H) and, for each run, the inputs of the activation (n, F)."""
    out_AH = torch.empty_like(x_AH)
    act = ACTIVATION_FUNCTIONS[activation]
    hidden = []
    for run in parts:
        rows, own = run.rows, run.experts
        if rows.start == rows.stop:
            hidden.append(x_AH.new_empty(0, w1_eFH.size(1)))
            continue
        normed_nH = x_AH[rows]
        if gain_eH is not None and offset_eH is not None:
            normed_nH, _ = run.norm(normed_nH, gain_eH[own], offset_eH[own])
        hidden.append(run.product(normed_nH, w1_eFH[own], b1_eF[own]))
        run.product(act(hidden[-1]), w2_eHF[own], b2_eH[own], out_AH[rows])
    return out_AH, hidden


def _gradients(
    parts: Sequence[Run],
    grad_AH: Tensor,
    x_AH: Tensor,
    gain_eH: Tensor | None,
    offset_eH: Tensor | None,
    w1_eFH: Tensor,
    w2_eHF: Tensor,
    hidden: Sequence[Tensor],
    activation: str,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of tokens, gains, offsets, ``w1``, ``b1``, ``w2`` and ``b2``."""
    grad_AH = grad_AH.contiguous()
    grad_x_AH, grad_w1_eFH, grad_w2_eHF = (torch.empty_like(value) for value in (x_AH, w1_eFH, w2_eHF))
    grad_gain_eH, grad_offset_eH = (
        None if value is None else torch.empty_like(value) for value in (gain_eH, offset_eH)
    )
    grad_b1_eF, grad_b2_eH = w1_eFH.new_empty(w1_eFH.shape[:2]), w2_eHF.new_empty(w2_eHF.shape[:2])
    act = ACTIVATION_FUNCTIONS[activation]
    for run, hidden_nF in zip(parts, hidden, strict=True):
        rows, own = run.rows, run.experts
        x_nH, grad_nH = x_AH[rows], grad_AH[rows]
        _total(run, grad_b2_eH, run.sums(grad_nH))
        run.outer(grad_nH, act(hidden_nF), grad_w2_eHF[own])
        grad_hidden_nF = run.transposed(grad_nH, w2_eHF[own])
        activation_gradient(activation, grad_hidden_nF, hidden_nF, out=grad_hidden_nF)
        _total(run, grad_b1_eF, run.sums(grad_hidden_nF))
        normed_nH = x_nH
        if gain_eH is not None and offset_eH is not None:
            normed_nH, statistics = run.norm(x_nH, gain_eH[own], offset_eH[own])
        run.outer(grad_hidden_nF, normed_nH, grad_w1_eFH[own])
        grad_nH = run.transposed(grad_hidden_nF, w1_eFH[own])
        if gain_eH is not None and offset_eH is not None:
            grad_nH, of_gain_eH, of_offset_eH = run.norm_gradients(
                grad_nH, x_nH, statistics, gain_eH[own], offset_eH[own]
            )
            _total(run, grad_gain_eH, of_gain_eH)
            _total(run, grad_offset_eH, of_offset_eH)
        grad_x_AH[rows] = grad_nH
    return grad_x_AH, grad_gain_eH, grad_offset_eH, grad_w1_eFH, grad_b1_eF, grad_w2_eHF, grad_b2_eH


def _total(run: Run, total_e: Tensor | None, of_run_e: Tensor) -> None:
    """Writes the sums over a run's tokens to where the sums over all tokens of its experts are collected."""
    assert total_e is not None
    if run.continues:
        total_e[run.experts] += of_run_e
    else:
        total_e[run.experts] = of_run_e


# Two operators for graphs of torch.compile, in which the numbers of tokens are not known.
_TENSORS = "Tensor x, Tensor counts, Tensor? gain, Tensor? offset, Tensor w1"


def _op(x_AH: Tensor, counts_e: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    counts = counts_e.tolist()
    _check_counts(counts, x_AH, len(rest[2]))
    parts = list(runs(counts, x_AH, rest[2].size(1)))
    out_AH, hidden = _outputs(parts, x_AH, *rest)
    return out_AH, torch.cat(hidden)


def _fake_op(x_AH: Tensor, counts_e: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x_AH), x_AH.new_empty(x_AH.size(0), rest[2].size(1))


def _gradients_op(grad_AH: Tensor, x_AH: Tensor, counts_e: Tensor, *rest: Any) -> list[Tensor]:
    gain_eH, offset_eH, w1_eFH, w2_eHF, hidden_AF, activation = rest
    parts = list(runs(counts_e.tolist(), x_AH, w1_eFH.size(1)))
    hidden = [hidden_AF[run.rows] for run in parts]
    found = _gradients(parts, grad_AH, x_AH, gain_eH, offset_eH, w1_eFH, w2_eHF, hidden, activation)
    return [value for value in found if value is not None]


def _fake_gradients(grad_AH: Tensor, x_AH: Tensor, counts_e: Tensor, *rest: Any) -> list[Tensor]:
    gain_eH, offset_eH, w1_eFH, w2_eHF, _, _ = rest
    b1_eF, b2_eH = w1_eFH.new_empty(w1_eFH.shape[:2]), w2_eHF.new_empty(w2_eHF.shape[:2])
    wanted = (x_AH, gain_eH, offset_eH, w1_eFH, b1_eF, w2_eHF, b2_eH)
    return [torch.empty_like(value) for value in wanted if value is not None]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.activation = inputs
    x_AH, counts_e, gain_eH, offset_eH, w1_eFH, _, w2_eHF, _ = tensors
    ctx.save_for_backward(x_AH, counts_e, gain_eH, offset_eH, w1_eFH, w2_eHF, output[1])


def _backward(ctx: Any, grad_AH: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    found = torch.ops.smlp.expert_feed_forward_gradients(grad_AH, *ctx.saved_tensors, ctx.activation)
    norm = (None, None) if len(found) == 5 else found[1:3]
    return (found[0], None, *norm, *found[-4:], None)


_NAME = add_operator(
    f"smlp::expert_feed_forward({_TENSORS}, Tensor b1, Tensor w2, Tensor b2, str activation) -> (Tensor, Tensor)",
    _op,
    _fake_op,
)
add_operator(
    f"{_NAME}_gradients(Tensor grad, {_TENSORS}, Tensor w2, Tensor hidden, str activation) -> Tensor[]",
    _gradients_op,
    _fake_gradients,
)
torch.library.register_autograd(_NAME, _backward, setup_context=_keep)
