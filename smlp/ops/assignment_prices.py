"""Prices at which tokens that take what is best for them load all experts equally.

Letters: ``B`` problems, ``N`` tokens, ``E`` experts, ``M`` tokens of a sample.

At a temperature ``t`` a token takes expert e with probability ``softmax((value - price) / t)_e``. The prices that make
all expected loads equal are those of entropic optimal transport (Cuturi, 2013; Sinkhorn's iterations find them too,
but move by no more than about ``t`` each). Here they are found by Newton's method on the diagonal of the Hessian: the
load of an expert falls by ``sum p (1 - p) / t`` for each unit of price. High temperatures, which only have to find the
rough place, look at a sample of the tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smlp.ops.bands import columns_by_bands, rows_by_bands
from smlp.ops.fast_paths import bands_of_tokens

#: temperatures, as shares of the median token's spread, and Newton steps at each
COARSE = ((0.2, 2), (0.05, 2), (0.015, 2))
FINE = ((0.01, 4),)
#: temperatures for values of which many are equal, and at most so many Newton steps at each
FINEST = (0.003, 0.001, 0.0003, 0.0001, 0.00003, 0.00001, 0.000003)
FINEST_STEPS = 8
#: there loads are good enough if they differ by less than this share; the Hessian's diagonal is raised by the other
_NEAR, _RIDGE = 0.02, 0.01
#: tokens of a sample for each expert, and at least
SAMPLE_PER_EXPERT, SMALLEST_SAMPLE = 8, 512
#: steps of one temperature that learn how loads answer to prices; later ones remember it
_SLOPES = 2
#: largest step, in temperatures
_LARGEST_STEP = 4.0
_LARGEST_FINE_STEP = 5.0
#: smallest logarithm of a weight. Its square is still a normal float32: a CPU takes many times as long for others
_SMALLEST_LOG = -40.0
_SMALLEST = 1e-12


def equal_load_prices(values_BNE: Tensor) -> Tensor:
    """Prices of the experts, (B, 1, E), from values whose unit is the usual spread of a token, (B, N, E)."""
    num_problems, num_tokens, num_experts = values_BNE.shape
    price_B1E = values_BNE.new_zeros(num_problems, 1, num_experts)
    num_sampled = max(SMALLEST_SAMPLE, SAMPLE_PER_EXPERT * num_experts)
    if 2 * num_sampled > num_tokens:
        return _newton(values_BNE, price_B1E, COARSE + FINE)
    generator = torch.Generator().manual_seed(num_tokens)
    sample_M = torch.randperm(num_tokens, generator=generator, device="cpu")[:num_sampled]
    price_B1E = _newton(values_BNE.index_select(1, sample_M.to(values_BNE.device)), price_B1E, COARSE)
    return _newton(values_BNE, price_B1E, FINE)


def finest_prices(values_BNE: Tensor) -> Tensor:
    """Return what to add to prices that are already subtracted from the values, (B, 1, E).

    For values of which many are equal, where experts compete for whole groups of tokens at once: Newton's method on the
    whole Hessian, which knows how loads answer to the prices of other experts, down to temperatures far below the noise
    that breaks ties. Of 4096 equal tokens and 32 experts some 35 are left to move.
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
    """``exp((value - price) / temperature)``, (B, N, E), each token's largest being one, and none below 4e-18."""
    torch.sub(values_BNE, price_B1E, out=out)
    out.sub_(out.amax(dim=2, keepdim=True)).mul_(1 / temperature).clamp_min_(_SMALLEST_LOG).exp_()


def _by_token(weight_BNE: Tensor, factor_BE1: Tensor) -> Tensor:
    """Each token's sum of weights times factors, (B, N, 1)."""
    bands = bands_of_tokens(weight_BNE)
    if bands == 1:
        return torch.bmm(weight_BNE, factor_BE1)
    return rows_by_bands(weight_BNE[0], factor_BE1.view(1, -1), bands).unsqueeze(0)


def _by_expert(weight_BNE: Tensor, share_BN1: Tensor) -> Tensor:
    """Each expert's sum of weights times shares, (B, E, 1)."""
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
