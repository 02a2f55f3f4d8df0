"""Count which tokens and which features go to which expert, over a text in evaluation mode.

Letters: ``B`` sequences, ``n`` positions, ``N`` routed tokens, ``P`` pieces of the vocabulary that are counted apart,
``E`` experts, ``H`` features, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from smlp.errors import UserError
from smlp.evaluation.samples import Samples
from smlp.inference.scoring.candidates import drop_nothing
from smlp.moe.feature_layer import RoutedFeatureMoE
from smlp.moe.layer import TokenMoE
from smlp.nn.decoder import Decoder
from smlp.nn.state import ForwardContext, Observation


@dataclass
class TokenCounts:
    """Counts of one layer that routes tokens. A token counts once for each of its experts (GShard: two)."""

    name: str
    #: "BASE", "Switch", "GShard", "Hash" or that of a plugin
    router: str
    #: tokens of each counted piece that go to each expert, (P, E) int64
    counts_PE: np.ndarray
    #: all tokens that go to each expert, (E,) int64
    load_E: np.ndarray
    #: sum over all tokens of their affinity to each expert, (E,); None where there are no scores (Hash)
    affinity_E: np.ndarray | None = None
    #: the same sum over only the tokens that go to the expert
    own_affinity_E: np.ndarray | None = None
    num_tokens: int = 0
    #: tokens of each piece that were fed, (P,) int64, each counted once for all its choices; None if not counted
    tokens_P: np.ndarray | None = None
    #: sum over each piece's tokens of their affinity to every expert, (P, E); None without scores (Hash)
    affinity_PE: np.ndarray | None = None

    @property
    def choices_per_token(self) -> float:
        """Return the number of experts that a token goes to: 2 for GShard, else 1."""
        return float(self.load_E.sum()) / max(self.num_tokens, 1)

    @property
    def shares_PE(self) -> np.ndarray:
        """Return the share of each piece's tokens (GShard: choices) that goes to each expert; rows sum to 1."""
        return self.counts_PE / np.maximum(self.counts_PE.sum(axis=1, keepdims=True), 1)

    @property
    def load_share_E(self) -> np.ndarray:
        """Return the share of all tokens (choices) that goes to each expert."""
        return self.load_E / max(int(self.load_E.sum()), 1)

    @property
    def mean_affinity_E(self) -> np.ndarray | None:
        """Return the mean affinity of all tokens to each expert."""
        return None if self.affinity_E is None else self.affinity_E / max(self.num_tokens, 1)

    @property
    def mean_affinity_PE(self) -> np.ndarray | None:
        """Return the mean affinity of each piece's tokens to each expert; NaN for pieces that were not fed."""
        if self.affinity_PE is None:
            return None
        tokens_P1 = self.tokens_P[:, None]
        return np.where(tokens_P1 > 0, self.affinity_PE / np.maximum(tokens_P1, 1), np.nan)

    @property
    def mean_own_affinity_E(self) -> np.ndarray | None:
        """Return the mean affinity to each expert of the tokens that go to it; NaN for experts without tokens."""
        if self.own_affinity_E is None:
            return None
        return np.where(self.load_E > 0, self.own_affinity_E / np.maximum(self.load_E, 1), np.nan)

    @property
    def loyalty(self) -> float:
        """Return the share of the counted pieces' tokens (choices) that go to the most frequent expert of their piece.

        It is 1 (GShard: 1/2) if the piece alone decides, and about the largest load if pieces do not matter.
        """
        return float(self.counts_PE.max(axis=1).sum() / max(int(self.counts_PE.sum()), 1))


@dataclass
class FeatureCounts:
    """Counts of one sMoE whose features choose experts."""

    name: str
    #: "partial" or "leaky"
    routing: str
    #: number of sequences in which each feature went to each expert, (H, E) int64
    counts_HE: np.ndarray
    num_seqs: int = 0

    @property
    def shares_HE(self) -> np.ndarray:
        """Return the share of the sequences in which a feature goes to each expert; rows sum to 1."""
        return self.counts_HE / max(self.num_seqs, 1)

    @property
    def agreement_H(self) -> np.ndarray:
        """Return, for each feature, how often two different sequences send it to one expert; NaN for a single sequence.

        ``sum_e n_e (n_e - 1) / (S (S - 1))`` over S sequences: 1 if a feature always goes to one expert, and 1/E on
        average if every sequence draws a balanced assignment at random.
        """
        num_pairs = self.num_seqs * (self.num_seqs - 1)
        if num_pairs == 0:
            return np.full(len(self.counts_HE), np.nan)
        return (self.counts_HE * (self.counts_HE - 1)).sum(axis=1) / num_pairs


@dataclass
class RoutingCounts:
    """The counts of all routed layers over a text."""

    #: ids that are counted individually, in decreasing order of frequency, (P,)
    pieces_P: np.ndarray
    #: how often each was fed, (P,)
    frequency_P: np.ndarray
    #: number of tokens that were fed
    num_tokens: int
    num_seqs: int
    tokens: list[TokenCounts] = field(default_factory=list)
    features: list[FeatureCounts] = field(default_factory=list)


def count_routing(
    decoder: Decoder,
    samples: Samples,
    num_pieces: int = 40,
    batch_tokens: int = 4096,
    seen: Callable[[ForwardContext], None] | None = None,
) -> RoutingCounts:
    """Feed samples and count which tokens and features go to which expert.

    The decoder routes as in evaluation. From now on, its experts drop no tokens, so that the counts do not depend on
    how samples are batched. A token is the input at a position, not the prediction.

    Args:
        decoder: holding all experts; its mode is as before when this returns.
        samples: to feed; those too short for a prediction are skipped.
        num_pieces: the most frequent ids that are counted one by one.
        batch_tokens: positions in a batch.
        seen: called with each forward pass's context.

    Raises:
        UserError: no sample is long enough.
        NaNError: routing scores are NaN; the message names the layer.
    """
    batches = samples.batches(max_tokens=batch_tokens)
    if not batches:
        raise UserError(
            f"no sample is longer than the prefix of {decoder.config.prefix_tokens} tokens that chooses experts: give "
            "more text"
        )
    vocab_size, padding = decoder.config.vocab_size, decoder.config.padding_idx
    frequency_V = np.zeros(vocab_size, dtype=np.int64)
    for numbers in batches:
        frequency_V += np.bincount(samples.batch(numbers).sources_Bn.flatten().numpy(), minlength=vocab_size)
    frequency_V[padding] = 0
    pieces_P = np.argsort(-frequency_V, kind="stable")[: min(num_pieces, int((frequency_V > 0).sum()))]
    counts = _Counter(decoder, pieces_P)
    was_training = decoder.training
    decoder.eval()
    drop_nothing(decoder)
    try:
        with torch.no_grad():
            for numbers in batches:
                context = ForwardContext(observe=True)
                decoder.features(samples.batch(numbers).sources_Bn.to(counts.device), context=context)
                counts.add(context)
                if seen is not None:
                    seen(context)
    finally:
        decoder.train(was_training)
    num_seqs = sum(len(numbers) for numbers in batches)
    result = RoutingCounts(pieces_P, frequency_V[pieces_P], int(frequency_V.sum()), num_seqs)
    result.tokens, result.features = list(counts.tokens.values()), list(counts.features.values())
    return result


class _Counter:
    """Sums the routing counts of layers.

    Args:
        decoder: whose layers are counted.
        pieces_P: ids that are counted individually.
    """

    def __init__(self, decoder: Decoder, pieces_P: np.ndarray) -> None:
        self.config, self.device = decoder.config, decoder.embedding.weight.device
        self.row_V = torch.full((decoder.config.vocab_size,), -1, device=self.device)
        self.row_V[torch.from_numpy(pieces_P).to(self.device)] = torch.arange(len(pieces_P), device=self.device)
        self.tokens: dict[nn.Module, TokenCounts] = {}
        self.features: dict[nn.Module, FeatureCounts] = {}
        for module in decoder.modules():
            if isinstance(module, TokenMoE):
                self.tokens[module] = self._no_counts(module.name, len(pieces_P))
            elif isinstance(module, RoutedFeatureMoE):
                counts_HE = np.zeros((decoder.config.embed_dim, module.num_experts), dtype=np.int64)
                routing = "leaky" if module.is_leaky else "partial"
                self.features[module] = FeatureCounts(module.name, routing, counts_HE)

    def add(self, context: ForwardContext) -> None:
        """Count a finished forward pass."""
        ids_N = context.tokens_Bn.flatten()
        if context.valid_Bn is not None:
            ids_N = ids_N[context.valid_Bn.flatten()]
        for layer, counts in self.tokens.items():
            self._add_tokens(counts, ids_N, context.observations[layer])
        for layer, counts in self.features.items():
            expert_BH = context.plans[layer]
            chosen_BHE = nn.functional.one_hot(expert_BH, layer.num_experts)
            counts.counts_HE += chosen_BHE.sum(dim=0).cpu().numpy()
            counts.num_seqs += expert_BH.size(0)

    def _add_tokens(self, counts: TokenCounts, ids_N: Tensor, observation: Observation) -> None:
        plan, num_experts = observation.plan, len(counts.load_E)
        row_N = self.row_V[ids_N]
        is_counted_N = row_N >= 0
        row_A = row_N[plan.token_A]
        cell_A = (row_A * num_experts + plan.expert_A)[row_A >= 0]
        cells = torch.bincount(cell_A, minlength=counts.counts_PE.size).cpu().numpy()
        counts.counts_PE += cells.reshape(counts.counts_PE.shape)
        counts.load_E += plan.counts_E.cpu().numpy()
        counts.num_tokens += ids_N.numel()
        counts.tokens_P += torch.bincount(row_N[is_counted_N], minlength=len(counts.tokens_P)).cpu().numpy()
        if observation.logits_NE is not None:
            affinity_NE = self.config.router_kind.affinities(self.config, observation.logits_NE).double()
            own_A = affinity_NE[plan.token_A, plan.expert_A]
            all_E, own_E = affinity_NE.sum(dim=0), _summed(num_experts, plan.expert_A, own_A)
            # rows are tokens, not assignments: a token with two choices has one affinity to each expert
            pieces_PE = _summed(len(counts.tokens_P), row_N[is_counted_N], affinity_NE[is_counted_N])
            names = ("affinity_E", "own_affinity_E", "affinity_PE")
            for name, new in zip(names, (all_E, own_E, pieces_PE), strict=True):
                before = getattr(counts, name)
                setattr(counts, name, new.cpu().numpy() if before is None else before + new.cpu().numpy())

    def _no_counts(self, name: str, num_pieces: int) -> TokenCounts:
        kind, num_experts = self.config.router_kind, self.config.num_experts
        counts_PE = np.zeros((num_pieces, num_experts), dtype=np.int64)
        load_E, tokens_P = np.zeros(num_experts, dtype=np.int64), np.zeros(num_pieces, dtype=np.int64)
        return TokenCounts(name, kind.title or kind.name, counts_PE, load_E, tokens_P=tokens_P)


def _summed(num_rows: int, row_A: Tensor, values: Tensor) -> Tensor:
    """Return the sums of the values (A, ...) of each row, (num_rows, ...)."""
    return values.new_zeros(num_rows, *values.shape[1:]).index_add(0, row_A, values)


def layer_number(name: str) -> int:
    """Return the position in the stack of a layer with a ``name`` as in reports, "layer 3 (tMoE)"."""
    return int(name.split()[1])
