"""A part of a model, with its parameters and its work, and what formulas of parts share.

Every block and router states its own numbers (:mod:`smlp.nn.blocks`, :mod:`smlp.moe.routers`);
:mod:`smlp.costs.formula` has the convention, and :mod:`smlp.costs.memory` says what is kept for the backward pass.

Letters: ``n`` tokens of an input, ``E`` experts of which each token is due ``k``, ``m`` positions that are mixed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real

from smlp.config import ModelConfig
from smlp.errors import UserError

# kinds of work that multiply-adds are spent on, in any component
NORMS = "norms"
PROJECTIONS = "dense projections"
SPATIAL = "spatial"
SCORES = "attention"
ROUTER = "router"
EXPERTS = "experts"
OUTPUT = "output layer and loss"

#: a kind of component that several blocks share
ATTENTION = "self-attention"

#: multiply-adds of a layer norm per element
LAYER_NORM_FLOPS = 5
#: numbers that a layer norm keeps per position in addition to its input: mean and deviation
LAYER_NORM_KEEPS = 2


def linear_parameters(inputs: int, outputs: int) -> int:
    """Return the parameters of a linear layer; its multiply-adds are ``inputs * outputs``."""
    return inputs * outputs + outputs


def dropout_keeps(config: ModelConfig, probability: float | None = None) -> int:
    """Return how many numbers a dropout layer keeps for each position; its probability is ``dropout`` by default."""
    return config.embed_dim if (config.dropout if probability is None else probability) else 0


@dataclass(frozen=True)
class Component:
    """One part of the model: its parameters, and its work for an input of n tokens in each sequence.

    A component holds what its module holds except the modules of other components, so that all components together
    are the model.
    """

    #: path of its module in the decoder, such as ``blocks.3.mixing``; ``decoder`` for the decoder itself
    name: str
    #: index of its block in the stack; None outside blocks
    layer: int | None
    #: its kind, which names a row in tables; :data:`ROUTER` chooses experts for tokens, and padding costs it
    #: nothing
    kind: str
    #: parameters of one expert (all experts of a layer are alike)
    expert_params: int = 0
    #: E, or 0 if there are no experts
    num_experts: int = 0
    #: parameters that every rank holds
    other_params: int = 0
    #: multiply-adds per position of the batch, padding included, by kind of work; work done once per sequence is
    #: divided among its n positions
    work: Mapping[str, float] = field(default_factory=dict)
    #: number of positions of a sequence that it mixes, if any
    num_mixed: int = 0
    #: multiply-adds per (token, expert) pair; 0 if tokens are not routed
    flops_per_assignment: float = 0
    #: k, nominal number of experts per token; 0 if tokens are not routed
    assignments_per_token: int = 0
    #: gMLP-MoE: multiply-adds for each ordered (query, key) pair of tokens of one sequence at one expert, the token
    #: with itself and later keys included; nominally an expert has k*n/E tokens of a sequence, rounded up
    #: or down
    flops_per_pair: float = 0

    def __post_init__(self) -> None:
        numbers = {name: value for name, value in vars(self).items() if name not in ("name", "layer", "kind", "work")}
        for name, value in {**numbers, **self.work}.items():
            if not isinstance(value, Real) or not 0 <= value < math.inf:
                raise UserError(f"costs of {self.name}: {name} must be finite and at least 0, got {value!r:.40}")

    @property
    def flops_per_position(self) -> float:
        """Return the sum of ``work``."""
        return sum(self.work.values())

    def nominal_work(self, num_tokens: int, causal: bool = False) -> dict[str, float]:
        """Return the multiply-adds of a token, in sequences of n tokens without padding, by kind of work.

        Args:
            num_tokens: n.
            causal: in products that mix positions, count only contributions of the same or an earlier position.
        """
        work = dict(self.work)
        if causal:
            work |= {kind: work[kind] * _causal_share(self.num_mixed) for kind in (SPATIAL, SCORES) if kind in work}
        k = self.assignments_per_token
        if k:
            keys = _keys_of_a_token(k * num_tokens, self.num_experts) if self.flops_per_pair else 0
            keys *= _causal_share(keys) if causal else 1
            work[EXPERTS] = k * (self.flops_per_assignment + keys * self.flops_per_pair)
        return work

    def nominal_flops(self, num_tokens: int) -> float:
        """Return the sum of :meth:`nominal_work`."""
        return sum(self.nominal_work(num_tokens).values())


def _keys_of_a_token(num_assignments: int, num_experts: int) -> float:
    """Return how many tokens of its sequence a token meets at an expert, itself included, on average: k*n/E, if E
    divides k*n; otherwise some experts have one token more than others.
    """
    each, more = divmod(num_assignments, num_experts)
    return ((num_experts - more) * each**2 + more * (each + 1) ** 2) / num_assignments


def _causal_share(num_mixed: float) -> float:
    """Return the share of ordered pairs of m positions whose second is not later than the first: (m + 1) / 2m."""
    return (num_mixed + 1) / (2 * num_mixed) if num_mixed > 1 else 1.0
