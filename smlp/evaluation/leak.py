"""Test whether a later token changes an earlier prediction.

Letters: ``B`` sequences, ``T`` tokens, ``V`` vocabulary.

For positions t across the context, all tokens >= t of one sequence are replaced by others, and the largest change of
any logit before t, or of another sequence, is reported. Then the other sequences are replaced, which must not change
this one. In training mode all of it is done twice: with the routing of the unchanged input held fixed, and with routing
decided anew. Balanced assignment, and a limited capacity, look at all tokens of a batch, so that in training
a later token can change where an earlier one goes, or whether it is dropped; the second figure measures that.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index

import torch
from torch import Tensor

from smlp.config.registration import call_problem
from smlp.config.settings import require
from smlp.errors import NaNError, UserError
from smlp.moe.layer import TokenMoE
from smlp.moe.plan import RoutingPlan
from smlp.nn.decoder import Decoder
from smlp.nn.state import ForwardContext

#: largest change due to rounding, as a share of the largest logit: matrix products may sum in a different order if an
#: expert receives a different number of tokens
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class LeakReport:
    """The largest change found in one mode and precision."""

    mode: str
    dtype: torch.dtype
    #: largest absolute change of a logit at a position < t
    largest_change: float
    #: largest absolute logit; rounding errors scale with it
    largest_logit: float
    #: t at which it was found; 0 where the other sequences were replaced, or nothing changed
    position: int
    #: share of unchanged earlier tokens that went to other experts, over all token-routed layers and all t
    rerouted: float
    #: whether later tokens affect earlier ones in this mode by design of the router
    expected: bool

    @property
    def leaks(self) -> bool:
        """Return whether the change is more than rounding."""
        return not self.largest_change <= TOLERANCE[self.dtype] * self.largest_logit

    @property
    def passed(self) -> bool:
        """Return whether there is no leak, or only one by design of the router."""
        return self.expected or not self.leaks


def default_positions(max_tokens: int, count: int = 9) -> list[int]:
    """Return about ``count`` positions from 1 to T-1, ends included; a single one in the middle, where most is seen."""
    last = max_tokens - 1
    count = min(count, last)
    if count == 1:
        return [max_tokens // 2]
    return sorted({1 + round(i * (last - 1) / max(count - 1, 1)) for i in range(count)}) if last >= 1 else []


def leak_test(
    decoder: Decoder,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
    positions: Sequence[int] | None = None,
    num_seqs: int = 2,
    seed: int = 1,
) -> list[LeakReport]:
    """Look for influence of later tokens on earlier logits.

    A copy of the decoder is tested, and the random state is restored. Dropout draws the same values for
    the two inputs that are compared.

    Args:
        decoder: with any weights; see :func:`randomise` for fresh ones, whose spatial weights hide every leak.
        dtypes: precisions to test.
        positions: values of t; by default nine from 1 to T-1.
        num_seqs: B; the first sequence is changed from each position on, then all of the others, so that influence
            across sequences shows as well.
        seed: of the random tokens.

    Raises:
        UserError: there is no position, sequence or type to test, a position is outside the context, the rounding error
            of a type is unknown, a number is no whole one, or logits are not finite.
    """
    if getattr(getattr(decoder, "config", None), "is_bidirectional", True):  # also of a compiled one
        raise UserError(f"a leak test takes a decoder, such as load_pretrained(PATH).decoder, got {decoder!r:.80}")
    config = decoder.config
    dtypes = list(dtypes)
    require(bool(dtypes), f"a leak test needs at least one type of {', '.join(map(str, TOLERANCE))}")
    for dtype in dtypes:
        if dtype not in TOLERANCE:
            raise UserError(f"a leak test cannot run in {dtype}, only in {', '.join(map(str, TOLERANCE))}")
    try:
        positions = default_positions(config.max_tokens) if positions is None else list(map(index, positions))
        num_seqs, seed = index(num_seqs), index(seed)
    except TypeError as error:
        raise UserError(f"positions, num_seqs and seed of a leak test must be whole numbers ({error})") from None
    require(num_seqs >= 1, f"a leak test needs num_seqs of at least 1, got {num_seqs}")
    require(-(2**63) <= seed < 2**64, f"seed must be at least -2**63 and below 2**64, got {seed}")
    if not positions or not all(0 < position < config.max_tokens for position in positions):
        raise UserError(
            f"a leak test needs positions between 1 and {config.max_tokens - 1} in a context of {config.max_tokens} "
            f"tokens, got {positions}"
        )
    generator = torch.Generator().manual_seed(seed)
    shape = (num_seqs, config.max_tokens)
    allowed = torch.tensor([token for token in range(config.vocab_size) if token != config.padding_idx])
    drawn, size = torch.randint(allowed.numel(), shape, generator=generator), allowed.numel()
    shift = torch.randint(1, size, shape, generator=generator)  # every other one differs
    tokens, others = allowed[drawn], allowed[(drawn + shift) % size]
    device, reports = decoder.embedding.weight.device, []
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        for dtype in dtypes:
            tested = copy.deepcopy(decoder).to(dtype)
            for mode in ("evaluation", "training, routing fixed", "training"):
                tested.train(mode != "evaluation")
                reports.append(_largest_change(tested, mode, dtype, tokens, others, positions))
    return reports


def randomise(decoder: Decoder, seed: int = 1) -> Decoder:
    """Give every parameter values of ordinary size, in place, so that every path carries a signal."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in decoder.parameters():
            scale = parameter.size(-1) ** -0.5 if parameter.dim() > 1 else 1.0
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return decoder


def _largest_change(
    decoder: Decoder, mode: str, dtype: torch.dtype, tokens: Tensor, others: Tensor, positions: Sequence[int]
) -> LeakReport:
    reference, reference_context = _logits(decoder, tokens, ForwardContext())
    if not reference.isfinite().all():
        num_bad, dtype_name = int((~reference.isfinite()).sum()), str(dtype).removeprefix("torch.")
        raise NaNError(
            f"{num_bad:,} of {reference.numel():,} logits are not finite in {dtype_name}: no leak can be seen"
        )
    largest, where, moved, compared = 0.0, 0, 0, 0
    for position in [*positions, 0] if len(tokens) > 1 else positions:
        replaced = torch.zeros_like(tokens, dtype=torch.bool)
        if position:
            replaced[0, position:] = True
        else:
            replaced[1:] = True
        changed = torch.where(replaced, others, tokens)
        plans = dict(reference_context.plans) if mode == "training, routing fixed" else {}
        logits, context = _logits(decoder, changed, ForwardContext(plans=plans))
        difference = (logits - reference).abs()
        difference[replaced] = 0
        change = float(difference.max())
        if change > largest or change != change:
            largest, where = change, position
        if position:
            same, total = _same_experts(reference_context, context, ~replaced)
            moved, compared = moved + total - same, compared + total
    expected = mode == "training" and any(
        [_looks_ahead(module) for module in decoder.modules() if isinstance(module, TokenMoE)]
    )
    return LeakReport(
        mode, dtype, largest, float(reference.abs().max()), where, moved / compared if compared else 0.0, expected
    )


def _looks_ahead(layer: TokenMoE) -> bool:
    """Ask the router of a layer, which may be that of a plug-in.

    Raises:
        UserError: it has no such method, or does not answer with yes or no.
    """
    method = getattr(layer.router, "looks_ahead", None)
    problem = call_problem(method)
    answer = None if problem is not None else method()
    if not isinstance(answer, bool):
        what = f"{layer.name}: looks_ahead() of {type(layer.router).__name__}"
        raise UserError(f"{what} {problem or f'returned {answer!r:.40}, not True or False'}")
    return answer


@torch.no_grad()
def _logits(decoder: Decoder, tokens: Tensor, context: ForwardContext) -> tuple[Tensor, ForwardContext]:
    device = decoder.embedding.weight.device
    torch.manual_seed(0)  # the same dropout for both inputs
    return decoder(tokens.to(device), context=context).logits.float(), context


def _same_experts(before: ForwardContext, after: ForwardContext, unchanged: Tensor) -> tuple[int, int]:
    """Count the unchanged tokens that kept their experts, and all unchanged tokens, over all token-routed layers."""
    same = total = 0
    for layer, plan in before.plans.items():
        if isinstance(plan, RoutingPlan):
            kept_N = (_assigned(plan) == _assigned(after.plans[layer])).all(dim=1)
            same += int(kept_N[unchanged.flatten()].sum())
            total += int(unchanged.sum())
    return same, total


def _assigned(plan: RoutingPlan) -> Tensor:
    """Return whether each token has each expert, (N, E)."""
    assigned_NE = torch.zeros(plan.num_tokens, plan.num_experts, dtype=torch.bool)
    assigned_NE[plan.token_A.cpu(), plan.expert_A.cpu()] = True
    return assigned_NE
