"""Updates on random tokens, timed as they are and then profiled: what ``smlp costs`` runs on each rank.

Letters: ``B`` sequences, ``T`` context, ``V`` vocabulary.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from smlp.config import ModelConfig
from smlp.costs.breakdown import costs_of_trace
from smlp.costs.formula import num_masked
from smlp.costs.recording import recording, trace_of, update_range
from smlp.moe.experts import expert_parameters
from smlp.nn.build import model_of
from smlp.nn.decoder import Decoder
from smlp.nn.encoder import Encoder
from smlp.ops import token_losses
from smlp.parallel import Ranks, global_grad_norm, reduce_expert_gradients
from smlp.parallel.spans import BACKWARD, FORWARD, OPTIMIZER, REDUCTION, span

#: updates before anything is timed
WARM_UP = 2
_CLIP_NORM = 1.0


@dataclass(frozen=True)
class Measured:
    """The measurements of one rank."""

    #: seconds of each update without a profiler
    seconds: list[float]
    #: :func:`costs_of_trace` of as many updates with a profiler, which slows them down
    costs: dict[str, Any]


def measure(
    config: ModelConfig, ranks: Ranks, num_seqs: int, num_updates: int, device: torch.device, trace: Path | None = None
) -> Measured:
    """Train a model with random weights on random tokens; a collective over all ranks.

    Args:
        config: the model.
        ranks: which rank holds which experts.
        num_seqs: B, of this rank; each is of T tokens.
        num_updates: to be timed, and then again to be profiled.
        device: where to compute.
        trace: file for the Chrome trace of the profiled updates.
    """
    torch.manual_seed(1)
    trainer = _Trainer(config, ranks, device)
    generator = torch.Generator().manual_seed(ranks.layout.rank)
    # every id except padding
    tokens_BT = torch.randint(config.vocab_size - 1, (num_seqs, config.max_tokens), generator=generator)
    tokens_BT = (tokens_BT + (tokens_BT >= config.padding_idx)).to(device)
    for _ in range(WARM_UP):
        trainer.update(tokens_BT)
    seconds = []
    for _ in range(num_updates):
        start = time.perf_counter()
        trainer.update(tokens_BT)
        seconds.append(time.perf_counter() - start)
    with recording(trainer.model, device) as recorded:
        for _ in range(num_updates):
            trainer.update(tokens_BT)
    return Measured(seconds, costs_of_trace(trace_of(recorded, trace)["traceEvents"]))


class _Trainer:
    """Trains with Adam; gradients are summed over ranks after the backward pass, then clipped."""

    def __init__(self, config: ModelConfig, ranks: Ranks, device: torch.device) -> None:
        self.ranks = ranks
        self.model = model_of(config, ranks).to(device).train()
        self.experts = [parameter for _, parameter, _ in expert_parameters(self.model)]
        owned = {id(parameter) for parameter in self.experts}
        self.dense = [parameter for parameter in self.model.parameters() if id(parameter) not in owned]
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4)

    def update(self, tokens_BT: Tensor) -> None:
        """Do one update; return when it is done on the device as well."""
        with update_range(tokens_BT.device):
            with span(FORWARD):
                loss = training_loss(self.model, tokens_BT, tokens_BT.roll(-1, dims=1))
            with span(BACKWARD):
                loss.backward()
            with span(REDUCTION):
                reduce_expert_gradients(self.dense, self.ranks.world)  # every rank holds them, like replicas
                reduce_expert_gradients(self.experts, self.ranks.replicas)
                norm = global_grad_norm(self.dense, self.experts, self.ranks)
                parameters = [*self.dense, *self.experts]
                nn.utils.clip_grads_with_norm_(parameters, _CLIP_NORM, norm.float())
            with span(OPTIMIZER):
                self.optimizer.step()
                self.optimizer.zero_grad()


def training_loss(model: Decoder | Encoder, source_BT: Tensor, target_BT: Tensor) -> Tensor:
    """Return a loss that takes as much work as that of training, to time updates: for a decoder, of the next tokens,
    with auxiliary losses; for an encoder, of as many tokens of ``source_BT`` as training masks."""
    if isinstance(model, Encoder):
        num_asked = source_BT.size(0) * num_masked(source_BT.size(1))
        asked_M = torch.arange(num_asked, device=source_BT.device) * source_BT.numel() // num_asked
        return token_losses(model(source_BT, asked_M), source_BT.flatten()[asked_M]).mean()
    output = model(source_BT)
    losses_BT = token_losses(output.logits, target_BT)
    return losses_BT[:, model.config.prefix_tokens :].mean() + sum(output.aux_losses.values())
