"""Check that a model's loss does not depend on how it is computed: batch size, ranks, capacity of experts."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass

import numpy as np

from smlp.errors import UserError
from smlp.evaluation.samples import Samples
from smlp.evaluation.scoring import score_samples
from smlp.inference.scoring.candidates import capacity_limits, limit_capacity
from smlp.launch.team import Team
from smlp.moe.experts import expert_parameters
from smlp.nn.decoder import Decoder
from smlp.parallel import connect, cut_state

BATCH_SIZES = (1, 8)
#: largest relative difference of losses due to rounding
TOLERANCE = 1e-5


@dataclass(frozen=True)
class ParityCell:
    """The loss of one way to compute it."""

    #: 0 drops nothing
    capacity_factor: float
    #: ranks that the experts are spread over
    num_ranks: int
    batch_size: int
    #: mean over the scored tokens, in nats
    loss: float
    #: share of the tokens' expert choices that were dropped
    dropped_share: float


@dataclass(frozen=True)
class Parity:
    """The losses, dropless ones first; and what could not be compared, one sentence each."""

    cells: tuple[ParityCell, ...]
    left_out: tuple[str, ...]

    def relative(self, cell: ParityCell) -> float:
        """Return the difference of a cell's loss from the first cell's, relative to the latter."""
        first = self.cells[0].loss
        return (cell.loss - first) / first

    def check(self) -> None:
        """Refuse dropless losses that differ.

        Raises:
            UserError: they differ by more than :data:`TOLERANCE`; the message names the cell.
        """
        first = self.cells[0]
        for cell in self.cells:
            if cell.capacity_factor == 0 and not abs(self.relative(cell)) <= TOLERANCE:
                raise UserError(
                    f"the loss depends on how it is computed: without drops it is {cell.loss:.8f} with batches "
                    f"of {cell.batch_size} on {cell.num_ranks} rank{'s' * (cell.num_ranks > 1)}, but {first.loss:.8f} "
                    f"with batches of {first.batch_size} on one, which is more than {TOLERANCE:g} apart"
                )

    def to_plain(self) -> dict:
        """Return plain values for JSON."""
        cells = [{**asdict(cell), "relative_difference": self.relative(cell)} for cell in self.cells]
        return {"tolerance": TOLERANCE, "cells": cells, "left_out": list(self.left_out)}


def compare(decoder: Decoder, samples: Samples, num_tokens: int, team: Team) -> Parity:
    """Score samples in every way that the model has. A collective; every rank gets the result.

    Args:
        decoder: with all experts, in evaluation mode; its capacity in evaluation is changed.
        samples: of a stream.
        num_tokens: of the stream.
        team: the ranks to spread experts over.
    """
    decoders, factors, left_out = [(decoder, 1)], [0.0], []
    config = decoder.config
    if team.size == 1:
        left_out.append("ranks: there is one")
    elif not config.num_sparse_layers:
        left_out.append(f"{team.size} ranks: the model has no experts to spread")
    elif config.num_experts % team.size:
        left_out.append(f"{team.size} ranks: {config.num_experts} experts cannot be shared evenly")
    else:
        decoders.append((spread(decoder), team.size))
    trained = config.capacity_factor
    if capacity_limits(decoder) and trained > 0:
        factors.append(trained)
    else:
        left_out.append("capacity: no token is ever dropped in this model, not in training either")
    cells = []
    for factor, (one, num_ranks), batch_size in itertools.product(factors, decoders, BATCH_SIZES):
        limit_capacity(one, factor)
        scores = score_samples(one, samples, samples.batches(batch_size), num_tokens, team, in_step=num_ranks > 1)
        loss = -float(np.nanmean(scores.log_probs_N, dtype=np.float64))
        cells.append(ParityCell(factor, num_ranks, batch_size, loss, scores.choices.dropped_share))
    return Parity(tuple(cells), tuple(left_out))


def spread(decoder: Decoder) -> Decoder:
    """Return the same model with its experts spread over the ranks of torch.distributed; a collective."""
    ranks = connect(decoder.config.num_experts)
    part = Decoder(decoder.config, ranks).to(decoder.embedding.weight.device).eval()
    names = [name for name, _, _ in expert_parameters(decoder)]
    part.load_state_dict(cut_state(decoder.state_dict(), names, ranks.layout))
    return part
