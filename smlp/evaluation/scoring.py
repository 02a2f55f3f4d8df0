"""Log-probabilities of the tokens of a stream, sample by sample, on one rank or shared among several.

Letters: ``N`` tokens of the stream, ``T`` the model's context, ``B`` samples of a batch, ``n`` their positions, ``K``
scored positions, ``H`` features, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from smlp.errors import UserError
from smlp.evaluation.samples import Cutting, SampleBatch, Samples, cut
from smlp.inference.scoring.candidates import check_log_probs, logits_in_pieces, scored
from smlp.launch.team import Team
from smlp.moe.plan import RoutingPlan
from smlp.nn.decoder import Decoder
from smlp.nn.state import ForwardContext


@dataclass
class Choices:
    """Choices of experts by tokens over forward passes: those that capacity could have dropped, and those it
    dropped."""

    num_choices: int = 0
    num_dropped: int = 0

    def count(self, context: ForwardContext) -> None:
        """Add the choices of a finished forward pass."""
        for plan in context.plans.values():
            if isinstance(plan, RoutingPlan) and "capacity" in plan.dropped:
                self.num_choices += plan.choice_NK.numel()
                self.num_dropped += plan.dropped["capacity"]

    @property
    def dropped_share(self) -> float:
        """Return the share of dropped choices; 0 where nothing can be dropped."""
        return self.num_dropped / self.num_choices if self.num_choices else 0.0


@dataclass(frozen=True)
class Scores:
    """The scores of a stream, after its samples have been scored."""

    #: natural log-probability of each token, (N,) float32; NaN for tokens that were not scored
    log_probs_N: np.ndarray
    choices: Choices = field(default_factory=Choices)


@torch.no_grad()
def score_batch(decoder: Decoder, batch: SampleBatch, context: ForwardContext) -> Tensor:
    """Return the natural log-probability of each target that is to be scored, in order, (K,) float32 on the CPU.

    Logits are made at these positions only, some at a time.
    """
    device = decoder.embedding.weight.device
    x_BnH, _ = decoder.features(batch.sources_Bn.to(device), context=context)
    wanted_Bn = batch.places_Bn >= 0
    x_KH, targets_K = x_BnH[wanted_Bn.to(device)], batch.targets_Bn[wanted_Bn].to(device)
    pieces = (scored(*piece)[0].cpu() for piece in logits_in_pieces(decoder, x_KH, targets_K))
    return torch.cat([torch.zeros(0), *pieces])


def score_samples(
    decoder: Decoder,
    samples: Samples,
    batches: Sequence[np.ndarray],
    num_tokens: int,
    team: Team | None = None,
    in_step: bool = False,
    seen: Callable[[ForwardContext], None] | None = None,
) -> Scores:
    """Score samples, each batch on one of the ranks; every rank gets everything. A collective over the team.

    A batch is computed in the same way whichever rank gets it, so that the numbers do not depend on how many there are.

    Args:
        decoder: in the mode in which to score.
        samples: of a stream.
        batches: numbers of samples that are fed together.
        num_tokens: N.
        team: ranks that share the batches; this process alone by default.
        in_step: whether all ranks make equally many forward passes, some with an empty batch; a decoder whose experts
            are spread over them needs this.
        seen: called with each forward pass's context on this rank.

    Raises:
        NaNError: a log-probability is NaN or infinite.
    """
    team = team or Team()
    own = list(batches[team.rank :: team.size])
    if in_step:
        own += [np.zeros(0, dtype=np.int64)] * (-(-len(batches) // team.size) - len(own))
    choices, parts = Choices(), []
    for numbers in own:
        batch, context = samples.batch(numbers), ForwardContext()
        log_probs_K = score_batch(decoder, batch, context)
        parts.append((batch.places_Bn[batch.places_Bn >= 0].numpy(), log_probs_K.numpy()))
        choices.count(context)
        if seen is not None:
            seen(context)
    log_probs_N, total = np.full(num_tokens, np.nan, dtype=np.float32), Choices()
    for their_parts, theirs in team.gather((parts, choices)):
        for places_K, log_probs_K in their_parts:
            check_log_probs(log_probs_K)
            log_probs_N[places_K] = log_probs_K
        total.num_choices += theirs.num_choices
        total.num_dropped += theirs.num_dropped
    return Scores(log_probs_N, total)


def block_log_probs(
    decoder: Decoder,
    tokens_N: Tensor,
    batch_size: int = 16,
    seen: Callable[[ForwardContext], None] | None = None,
    cutting: Cutting | None = None,
) -> Tensor:
    """Return the natural log-probability of every token given those before it in its block, (N,) float32.

    Token i stands at position ``i % T`` of its block and is predicted from the tokens before it in the block and the
    last one of the block before (or ``</s>``), as fairseq feeds them. The decoder's mode is the caller's.

    Args:
        decoder: any.
        tokens_N: ids (N,).
        batch_size: blocks at a time.
        seen: called with each forward pass's context.
        cutting: instead of blocks of T tokens; NaN where it scores nothing.
    """
    cutting = cutting or Cutting(decoder.config.max_tokens, decoder.config.max_tokens)
    samples = cut(tokens_N.numpy(), np.array([tokens_N.numel()]), cutting)
    scores = score_samples(decoder, samples, samples.batches(batch_size), tokens_N.numel(), seen=seen)
    return torch.from_numpy(scores.log_probs_N)


def block_nll(
    decoder: Decoder, tokens_N: Tensor, start_token: int, seen: Callable[[ForwardContext], None] | None = None
) -> float:
    """Return the mean of :func:`block_log_probs` in nats per token, over the positions that the model predicts.

    Raises:
        UserError: all tokens lie in the model's prefix.
    """
    cutting = Cutting.in_blocks(decoder.config, start_token)
    log_probs_N = block_log_probs(decoder, tokens_N, seen=seen, cutting=cutting)
    log_probs_N = log_probs_N[~log_probs_N.isnan()].double()
    if not len(log_probs_N):
        raise UserError(f"all {tokens_N.numel()} tokens lie in the prefix of {cutting.prefix} positions")
    return -float(log_probs_N.mean())


@torch.no_grad()
def stepwise_log_probs(decoder: Decoder, source_Bn: Tensor, target_Bn: Tensor, first: int = 0) -> Tensor:
    """Return the log-probability of each target from ``first`` on, with no later token seen, (B, n - first) float32.

    Every position takes a forward pass of its own, on the input cut off behind it. For a model that does not leak this
    is what one pass over the whole input gives; for one that does, it is what the model can really do.

    Args:
        decoder: in evaluation mode.
        source_Bn, target_Bn: ids of inputs and of what follows each, (B, n).
        first: first position that is scored.
    """
    columns = []
    for position in range(first, source_Bn.size(1)):
        logits_BV = decoder(source_Bn[:, : position + 1]).logits[:, -1].float()
        columns.append(logits_BV.log_softmax(dim=1).gather(1, target_Bn[:, position, None]))
    return torch.cat(columns, dim=1)
