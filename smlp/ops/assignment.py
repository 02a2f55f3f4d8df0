"""Balanced assignment of tokens to experts: prices, then repair.

Letters: ``B`` problems, ``N`` tokens, ``E`` experts, ``M`` tokens of a sample.

BASE (Lewis et al., 2021, section 3.1) maximises the total score under equal loads. At prices ``p`` every token takes
the expert that maximises ``score - p``: that is optimal among all assignments with the same loads.

Prices (:func:`equal_load_prices`) give loads that are nearly equal. At a temperature ``t`` a token takes expert e with
probability ``softmax((value - price) / t)_e``. The prices that make all expected loads equal are those of entropic
optimal transport (Cuturi, 2013; Sinkhorn's iterations find them too, but move by no more than about ``t`` each). Here
they are found by Newton's method on the diagonal of the Hessian: the load of an expert falls by ``sum p (1 - p) / t``
for each unit of price. High temperatures, which only have to find the rough place, look at a sample of the tokens.

The rest moves (:mod:`smlp.ops.assignment_repair`): in large problems the tokens that lose least; in small ones, and
where many tokens are equal, single tokens along the best paths in the graph of experts, so that the end is the optimum
of scores that differ from the given ones by at most ``TIE_NOISE`` of their usual spread, which is what breaks ties.
Time is bounded for any input.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from smlp.ops.assignment_repair import PathRepair, move_cheapest, num_to_move
from smlp.ops.fast_paths import add_operator, assign_exactly, bands_of_tokens, is_traced
from smlp.ops.functional import columns_by_bands, rows_by_bands
from smlp.ops.replay import Replayed

#: fixed noise of this share of the scores' spread breaks ties (the median token's largest minus smallest)
TIE_NOISE = 1e-3
#: a problem in which a larger share of the tokens has to move is taken for one with many equal tokens; where it is
#: repaired exactly, so many more tokens for each expert may have to move
MANY_MOVES, FEW_REPAIRS = 0.05, 2

#: temperatures, as shares of the median token's spread, and Newton steps at each
COARSE = ((0.2, 2), (0.05, 2), (0.015, 2))
FINE = ((0.01, 4),)
#: temperatures for values of which many are equal, and the most Newton steps at each
FINEST = (0.003, 0.001, 0.0003, 0.0001, 0.00003, 0.00001, 0.000003)
FINEST_STEPS = 8
#: at these temperatures, how much loads may differ and how much the Hessian's diagonal is raised, as shares of a load
_NEAR, _RIDGE = 0.02, 0.01
#: tokens of a sample for each expert, and in the smallest sample
SAMPLE_PER_EXPERT, SMALLEST_SAMPLE = 8, 512
#: steps of one temperature that measure how loads respond to prices; later ones reuse the result
_SLOPES = 2
#: largest step, in temperatures
_LARGEST_STEP = 4.0
_LARGEST_FINE_STEP = 5.0
#: smallest logarithm of a weight. Its square is still a normal float32: a CPU takes many times as long for others
_SMALLEST_LOG = -40.0


def balanced_assignment(scores: Tensor) -> Tensor:
    """Assigns each token to one expert, with loads that differ by at most one, for a nearly maximal total score.

    Args:
        scores: affinities (N, E), any real dtype and any N >= 0, E >= 1. An infinite entry counts as one well
            beyond the finite ones.

    Returns:
        The expert of each token, (N,), int64: each expert occurs ``floor(N/E)`` or ``ceil(N/E)`` times. The same
        scores always give the same result on the same device.

    Raises:
        ValueError: ``scores`` is not a real matrix with values and at least one column.
        FloatingPointError: a score is NaN.
    """
    _check(scores, ("N", "E"))
    if scores.is_meta:
        raise ValueError("scores must be a tensor with values, got one on the device meta")
    return balanced_assignments(scores.unsqueeze(0))[0]


def balanced_assignments(scores: Tensor) -> Tensor:
    """Solve several problems of :func:`balanced_assignment` of one size at once, each by itself.

    Args:
        scores: affinities (B, N, E).

    Returns:
        Experts (B, N), int64.

    Raises:
        ValueError: ``scores`` is not such a tensor, or has no column.
        FloatingPointError: a score is NaN.
    """
    _check(scores, ("B", "N", "E"))
    return torch.ops.smlp.balanced_assignments(scores) if is_traced() else _at_once(scores)


def _check(scores: Tensor, shape: tuple[str, ...]) -> None:
    if not isinstance(scores, Tensor) or scores.is_complex():
        kind = scores.dtype if isinstance(scores, Tensor) else type(scores).__name__
        raise ValueError(f"scores must be a tensor of real numbers, got {kind}")
    if scores.dim() != len(shape) or scores.size(-1) == 0:
        raise ValueError(f"scores must have shape ({', '.join(shape)}) with E >= 1, got {tuple(scores.shape)}")


def _at_once(scores_BNE: Tensor) -> Tensor:
    # no gradients, and hundreds of small operations are faster so; products of autocast would be too coarse
    with torch.inference_mode(), torch.autocast(scores_BNE.device.type, enabled=False):
        owner_BN = _assigned(scores_BNE)
    return owner_BN.clone()  # which a backward pass may keep


def _of_all(info: Any, in_dims: tuple[int, ...], scores: Tensor) -> tuple[Tensor, int]:
    """Assign many batches of problems (..., B, N, E) as one, for ``torch.func.vmap``."""
    scores_VBNE = scores.movedim(in_dims[0], 0)
    owner_XN = torch.ops.smlp.balanced_assignments(scores_VBNE.flatten(0, 1))
    return owner_XN.unflatten(0, scores_VBNE.shape[:2]), 0


# A single operator where torch traces: its number of steps depends on the values of the scores.
_NAME = add_operator(
    "smlp::balanced_assignments(Tensor scores) -> Tensor",
    _at_once,
    lambda scores: scores.new_empty(scores.shape[:2], dtype=torch.long),
)
torch.library.register_vmap(_NAME, _of_all)


def _assigned(scores: Tensor) -> Tensor:
    num_problems, num_tokens, num_experts = scores.shape
    if num_problems == 0 or num_tokens == 0 or num_experts == 1:
        check_no_nan(scores.flatten(0, 1))
        return torch.zeros(num_problems, num_tokens, dtype=torch.long, device=scores.device)
    values_BNE, low_BN1, high_BN1 = _finite_values(scores)
    fixed = [_tie_noise(num_tokens, num_experts, values_BNE.dtype, scores.device)]
    sample_M = _sample(num_tokens, num_experts, scores.device)
    if sample_M is not None:
        fixed.append(sample_M)
    values_BNE, price_B1E, worth_BNE, best_BN, owner_BN = _priced(values_BNE, low_BN1, high_BN1, *fixed)
    exactly = assign_exactly(num_tokens, num_experts)
    few = MANY_MOVES * num_tokens + (FEW_REPAIRS * num_experts if exactly else 0)
    for problem, (worth_NE, best_N, owner_N, price_1E) in enumerate(
        zip(worth_BNE, best_BN, owner_BN, price_B1E, strict=True)
    ):
        if num_to_move(owner_N, num_experts) > few:
            owner_N.copy_(_with_many_equal(worth_NE, price_1E))
        elif exactly:
            owner_N.copy_(_along_paths(values_BNE[problem], price_1E, owner_N))
        else:
            move_cheapest(worth_NE, best_N, owner_N, price_1E[0])
    return owner_BN


def _by_prices(
    values_BNE: Tensor, low_BN1: Tensor, high_BN1: Tensor, noise_NE: Tensor, sample_M: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Return scaled values, prices, values less prices, each token's largest, and its expert; values are changed."""
    num_tokens, num_experts = noise_NE.shape
    _normalise(values_BNE, low_BN1, high_BN1)
    values_BNE.add_(noise_NE, alpha=TIE_NOISE)
    # with fewer tokens than experts there are no loads to speak of
    if num_tokens >= num_experts:
        price_B1E = equal_load_prices(values_BNE, sample_M)
    else:
        price_B1E = torch.zeros_like(values_BNE[:, :1])
    exactly = assign_exactly(num_tokens, num_experts)
    worth_BNE = values_BNE - price_B1E if exactly else values_BNE.sub_(price_B1E)
    return values_BNE, price_B1E, worth_BNE, *worth_BNE.max(dim=2)


_priced = Replayed(_by_prices)


def _with_many_equal(worth_NE: Tensor, price_1E: Tensor) -> Tensor:
    """Return experts (N,) where they compete for groups of tokens, by better noise to break ties and finer prices.

    The noise of :func:`_tie_noise` is cheap, but two tokens with nearly the same number have nearly the same noise for
    all experts. Here every number is drawn by itself.
    """
    num_tokens, num_experts = worth_NE.shape
    generator = torch.Generator().manual_seed(num_tokens)
    drawn_NE = torch.rand(num_tokens, num_experts, generator=generator, dtype=torch.float32, device="cpu").to(worth_NE)
    noise_NE = _tie_noise(num_tokens, num_experts, worth_NE.dtype, worth_NE.device)
    worth_NE = torch.add(worth_NE, drawn_NE - noise_NE, alpha=TIE_NOISE)
    finer_1E = finest_prices(worth_NE.unsqueeze(0))[0]
    worth_NE.sub_(finer_1E)
    return _along_paths(worth_NE, price_1E + finer_1E, worth_NE.argmax(dim=1), taken_off=True)


def _along_paths(values_NE: Tensor, price_1E: Tensor, owner_N: Tensor, taken_off: bool = False) -> Tensor:
    """Return the experts (N,) that the prices give, repaired on the CPU; see :class:`PathRepair`."""
    values, prices, owners = (tensor.cpu().numpy() for tensor in (values_NE, price_1E[0], owner_N))
    return torch.from_numpy(PathRepair(values, prices, owners, taken_off).run()).to(values_NE.device)


def check_no_nan(scores: Tensor) -> None:
    """Raises FloatingPointError, with the number of bad tokens, if any score (N, E) is NaN; not where torch traces."""
    if is_traced():
        return
    bad = scores.isnan().any(dim=1)
    if bad.any():
        raise FloatingPointError(f"{int(bad.sum())} of {scores.size(0)} tokens have NaN routing scores")


def _finite_values(scores_BNE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return a copy in at least float32, an eighth of the scores, and each token's smallest and largest value.

    Raises:
        FloatingPointError: a score is NaN.
    """
    is_float = scores_BNE.is_floating_point()
    # integers in float64, which holds what an offset would hide in float32
    dtype = torch.promote_types(scores_BNE.dtype, torch.float32) if is_float else torch.float64
    values = scores_BNE.to(dtype, copy=True)
    values.mul_(1 / 8)  # room for sums below
    low, high = values.amin(dim=2, keepdim=True), values.amax(dim=2, keepdim=True)
    if not (low.isfinite() & high.isfinite()).all():
        check_no_nan(scores_BNE.flatten(0, 1))
        values = torch.stack([_finite(problem) for problem in values])
        low, high = values.amin(dim=2, keepdim=True), values.amax(dim=2, keepdim=True)
    return values, low, high


def _normalise(values_BNE: Tensor, low_BN1: Tensor, high_BN1: Tensor) -> None:
    """Scales the values in place so that a token's largest and smallest differ by about 1, if any do.

    A constant added to all scores of a token has no influence on the assignment; it is subtracted, so that a large one
    cannot hide the differences between experts. The unit is the median token's spread, which outliers do not move.
    """
    spread_BN = (high_BN1 - low_BN1).squeeze(2)
    unit_B = torch.where(spread_BN > 0, spread_BN, torch.nan).nanmedian(dim=1).values.nan_to_num(nan=1.0)
    # a small unit may not make an infinity of a mask such as ``finfo.min``
    values_BNE.sub_(high_BN1).div_(unit_B.view(-1, 1, 1)).clamp_min_(-1e30)


def _finite(values: Tensor) -> Tensor:
    """Replace infinite entries by values well beyond the finite ones."""
    finite = values.isfinite()
    low, high = values[finite].aminmax() if finite.any() else (values.new_zeros(()), values.new_zeros(()))
    beyond = torch.where(high > low, high - low, 1.0)
    return values.clamp(low - beyond, high + beyond)


@lru_cache(maxsize=8)
def _tie_noise(num_tokens: int, num_experts: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers in [0, 1), (N, E), with no pattern that tokens or experts share; the same ones every time."""
    token_N1 = torch.arange(num_tokens, dtype=torch.float64, device="cpu").mul_(0.6180339887498949).frac_().unsqueeze(1)
    expert_E = torch.arange(num_experts, dtype=torch.float64, device="cpu").mul_(0.7548776662466927).frac_()
    token_N1, expert_E = token_N1.to(device, dtype), expert_E.to(device, dtype)
    return torch.addcmul(expert_E, token_N1, 1 + 7 * expert_E).frac_()


def equal_load_prices(values_BNE: Tensor, sample_M: Tensor | None = None) -> Tensor:
    """Return the prices of the experts, (B, 1, E).

    Args:
        values_BNE: (B, N, E), whose unit is the usual spread of a token.
        sample_M: tokens with which the search begins, (M,); all by default.
    """
    num_problems, _, num_experts = values_BNE.shape
    price_B1E = values_BNE.new_zeros(num_problems, 1, num_experts)
    if sample_M is None:
        return _newton(values_BNE, price_B1E, COARSE + FINE)
    price_B1E = _newton(values_BNE.index_select(1, sample_M), price_B1E, COARSE)
    return _newton(values_BNE, price_B1E, FINE)


@lru_cache(maxsize=16)
def _sample(num_tokens: int, num_experts: int, device: torch.device) -> Tensor | None:
    """Return the tokens of a sample, (M,), the same on every device; None where all are too few for one."""
    num_sampled = max(SMALLEST_SAMPLE, SAMPLE_PER_EXPERT * num_experts)
    if 2 * num_sampled > num_tokens:
        return None
    generator = torch.Generator().manual_seed(num_tokens)
    return torch.randperm(num_tokens, generator=generator, device="cpu")[:num_sampled].to(device)


def finest_prices(values_BNE: Tensor) -> Tensor:
    """Return what to add to prices that are already subtracted from the values, (B, 1, E).

    Where many values are equal, experts compete for whole groups of tokens at once. Newton's method then uses the whole
    Hessian, which knows how loads respond to other experts' prices, down to temperatures far below the noise that
    breaks ties. With 4096 equal tokens and 32 experts, some 35 tokens are left to move.
    """
    num_problems, num_tokens, num_experts = values_BNE.shape
    load = num_tokens / num_experts
    price_B1E = values_BNE.new_zeros(num_problems, 1, num_experts)
    share_BNE = torch.empty_like(values_BNE)
    for temperature in FINEST:
        for _ in range(FINEST_STEPS):
            _weights(values_BNE, price_B1E, temperature, out=share_BNE)
            share_BNE.div_(share_BNE.sum(dim=2, keepdim=True))
            loads_BE = share_BNE.sum(dim=1).double()
            excess_BE = loads_BE - load
            if excess_BE.abs().max() < _NEAR * load:
                break
            hessian_BEE = torch.diag_embed(loads_BE + _RIDGE * load) - (share_BNE.mT @ share_BNE).double()
            step_BE = torch.linalg.solve(hessian_BEE, excess_BE)
            step_BE.div_((step_BE.abs().amax(dim=1, keepdim=True) / _LARGEST_FINE_STEP).clamp_min_(1))
            price_B1E = price_B1E + temperature * step_BE.unsqueeze(1).to(values_BNE.dtype)
    return price_B1E


def _weights(values_BNE: Tensor, price_B1E: Tensor, temperature: float, out: Tensor) -> None:
    """Write ``exp((value - price) / temperature)`` to ``out``: each token's largest is 1, none below 4e-18."""
    torch.sub(values_BNE, price_B1E, out=out)
    out.sub_(out.amax(dim=2, keepdim=True)).mul_(1 / temperature).clamp_min_(_SMALLEST_LOG).exp_()


def _by_token(weight_BNE: Tensor, factor_BE1: Tensor) -> Tensor:
    """Return each token's sum of weights times factors, (B, N, 1)."""
    bands = bands_of_tokens(weight_BNE)
    if bands == 1:
        return torch.bmm(weight_BNE, factor_BE1)
    return rows_by_bands(weight_BNE[0], factor_BE1.view(1, -1), bands).unsqueeze(0)


def _by_expert(weight_BNE: Tensor, share_BN1: Tensor) -> Tensor:
    """Return each expert's sum of weights times shares, (B, E, 1)."""
    bands = bands_of_tokens(weight_BNE)
    if bands == 1:
        return torch.bmm(weight_BNE.transpose(1, 2), share_BN1)
    return columns_by_bands(weight_BNE[0], share_BN1.flatten(), bands).unsqueeze(2)


def _newton(values_BNE: Tensor, price_B1E: Tensor, schedule: tuple[tuple[float, int], ...]) -> Tensor:
    num_problems, num_tokens, num_experts = values_BNE.shape
    load = num_tokens / num_experts
    # exact where all experts compete alike: raising all other prices lowers what is left for one
    damping = (num_experts - 1) / num_experts
    weight_BNE = torch.empty_like(values_BNE)
    square_BNE = torch.empty_like(values_BNE)
    for temperature, num_steps in schedule:
        _weights(values_BNE, price_B1E, temperature, out=weight_BNE)
        torch.mul(weight_BNE, weight_BNE, out=square_BNE)
        log_BE1 = values_BNE.new_zeros(num_problems, num_experts, 1)
        for step in range(num_steps):
            factor_BE1 = log_BE1.exp()
            share_BN1 = _by_token(weight_BNE, factor_BE1).reciprocal_()
            loads_BE1 = _by_expert(weight_BNE, share_BN1).mul_(factor_BE1)
            if step < _SLOPES:
                squares_BE1 = _by_expert(square_BNE, share_BN1 * share_BN1).mul_(factor_BE1).mul_(factor_BE1)
                slope_BE1 = (loads_BE1 - squares_BE1).clamp_min_(0.01 * load).div_(damping)
            change_BE1 = (loads_BE1 - load).div_(slope_BE1)
            log_BE1.sub_(change_BE1.clamp_(-_LARGEST_STEP, _LARGEST_STEP))
        price_B1E = price_B1E - temperature * log_BE1.transpose(1, 2)
    return price_B1E
