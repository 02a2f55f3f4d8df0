"""The router-health record of a training run; docs/router_health.md describes its fields.

Letters: ``B`` sequences, ``n`` tokens, ``E`` experts, ``M`` items of the probe set in a layer, ``S`` sums of a layer.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from smlp.costs.realised import Work, realised_work
from smlp.fairseq_compat.records import Journal
from smlp.moe.balance import first_choices, layer_record, num_sums, pooled_record, routing_sums
from smlp.moe.feature_layer import RoutedFeatureMoE
from smlp.moe.layer import TokenMoE
from smlp.nn.decoder import Decoder
from smlp.nn.state import ForwardContext

#: figures in fairseq's logs, for any number of layers and experts: name there, name in the pooled record
LOGGED = {
    "router_load_cv": "load_cv",
    "router_min_over_mean": "min_over_mean",
    "router_max_over_mean": "max_over_mean",
    "router_dead": "dead_experts",
    "router_load_entropy": "load_entropy",
    "router_gate_entropy": "gate_entropy",
    "router_margin": "margin",
    "router_alpha": "alpha_mean",
    "router_alpha_low": "alpha_low_share",
    "router_drop": "drop_share_capacity",
    "router_skip": "drop_share_second_expert",
    "router_churn": "churn",
}
REALISED = "router_realised"

_PROBE_TOKENS = 1024


class LiveFigures:
    """The figures of each layer as scalars for TensorBoard and Weights & Biases, where fairseq writes its own.

    TensorBoard shows them as the run ``routers``, next to fairseq's ``train_inner``, ``train`` and ``valid``.

    Args:
        tensorboard_logdir: fairseq's option, or None.
    """

    def __init__(self, tensorboard_logdir: str | None) -> None:
        self._folder = os.path.join(tensorboard_logdir, "routers") if tensorboard_logdir else None
        self._writer: Any = None

    def write(self, update: int, layers: dict[str, dict[str, Any]]) -> None:
        """Write the numbers of a record's ``layers``; their names are ``LAYER/FIGURE``."""
        scalars = {
            f"{re.sub(r'[^A-Za-z0-9]+', '_', layer).strip('_')}/{name}": value
            for layer, figures in layers.items()
            for name, value in figures.items()
            if isinstance(value, int | float)
        }
        if self._folder is not None and scalars:
            if self._writer is None:
                from fairseq.logging.progress_bar import SummaryWriter

                # a resumed run replaces what was written after its checkpoint
                self._writer = SummaryWriter(self._folder, purge_step=update)
            for name, value in scalars.items():
                self._writer.add_scalar(name, value, update)
            self._writer.flush()
        run = getattr(sys.modules.get("wandb"), "run", None)  # fairseq starts it for --wandb-project
        if run is not None and scalars:
            run.log(scalars, step=update)


class HealthRecorder:
    """Records what the routers of one process's model do.

    For an update that is to be reported: :meth:`start`, a forward pass with an observing context and :meth:`sums` for
    each micro-batch, then :meth:`report` with the sums of all micro-batches and ranks.

    Args:
        decoder: the model.
        tokens_Bn: input ids of the first batch; its first rows are the probe set.
        journal: where to write; None on all ranks but the first.
        live: shows the figures of each layer as they come; None on all ranks but the first.
    """

    def __init__(
        self, decoder: Decoder, tokens_Bn: Tensor, journal: Journal | None, live: LiveFigures | None = None
    ) -> None:
        self.decoder = decoder
        self.journal = journal
        self.live = live
        self.layers = [module for module in decoder.modules() if isinstance(module, TokenMoE | RoutedFeatureMoE)]
        self.probe_Bn = tokens_Bn[: max(1, _PROBE_TOKENS // tokens_Bn.size(1))].clone()
        self._update: int | None = None
        # first choices of the probe set's items, (M,) per layer: at the previous report and at this one
        self._before: list[Tensor] | None = None
        self._now: list[Tensor] | None = None

    def start(self, update: int) -> None:
        """Route the probe set with the model before the update; only once, even if the update is tried again."""
        if self._update != update:
            self._update, self._before = update, self._now
            self._now = probe_choices(self.decoder, self.layers, self.probe_Bn) if self.layers else []

    def sums(self, context: ForwardContext) -> Tensor:
        """Return what a forward pass did as one float64 vector: the work, then (S,) for each layer.

        The vector has the same length on every rank.
        """
        num_experts = self.decoder.config.num_experts
        device = context.tokens_Bn.device
        parts = [realised_work(self.decoder, context).to_tensor().to(device)]
        for index, layer in enumerate(self.layers):
            observation = context.observations.get(layer)
            if observation is None:  # the layer routed nothing
                parts.append(torch.zeros(num_sums(num_experts), dtype=torch.double, device=device))
                continue
            probe = None if self._before is None else (self._before[index], self._now[index])
            parts.append(routing_sums(observation, probe))
        return torch.cat(parts)

    def report(self, sums: Tensor) -> dict[str, float]:
        """Write the record of an update and return the figures for fairseq's logs."""
        record = self._record(sums.cpu())
        if self.journal is not None:
            self.journal.append(record)
        if self.live is not None:
            self.live.write(record["update"], record["layers"])
        figures = {key: record["pooled"][name] for key, name in LOGGED.items() if name in record["pooled"]}
        if record["work"]["ratio"] is not None:
            figures[REALISED] = record["work"]["ratio"]
        return figures

    def _record(self, sums: Tensor) -> dict[str, Any]:
        config = self.decoder.config
        work, routing = Work.from_tensor(sums[: Work.size()]), sums[Work.size() :]
        figures = [layer_record(sums_S) for sums_S in routing.view(len(self.layers), -1)] if self.layers else []
        layers = {}
        for layer, of_layer in zip(self.layers, figures, strict=True):
            over_tokens = isinstance(layer, TokenMoE)
            router, items = (config.router, "tokens") if over_tokens else (config.feature_routing, "features")
            layers[layer.name] = {"router": router, "items": items, **of_layer}
        flops = asdict(work)
        return {
            "update": self._update,
            "tokens": int(flops.pop("tokens")),
            "positions": int(flops.pop("positions")),
            "padded_share": work.padded_share,
            "work": {**flops, "ratio": work.ratio},
            "pooled": pooled_record(figures),
            "layers": layers,
        }


def probe_choices(decoder: Decoder, layers: list[TokenMoE | RoutedFeatureMoE], tokens_Bn: Tensor) -> list[Tensor]:
    """Return the expert that each item of a batch chooses first in evaluation, (M,) for each layer.

    This draws no random numbers and leaves every module in its mode.
    """
    modes = [(module, module.training) for module in decoder.modules()]
    context = ForwardContext(observe=True)
    decoder.eval()
    try:
        with torch.no_grad():
            decoder.features(tokens_Bn, context=context)
    finally:
        for module, training in modes:
            module.training = training
        # Before torch 2.10 autocast keeps weights that were converted without a gradient for the next forward pass.
        torch.clear_autocast_cache()
    seen = [context.observations.get(layer) for layer in layers]
    nothing_M = tokens_Bn.new_empty(0)
    return [nothing_M if observation is None else first_choices(observation.plan) for observation in seen]
