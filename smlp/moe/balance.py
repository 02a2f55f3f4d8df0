"""Statistics of routing: how even the loads are, how sure the gate is, what is dropped. docs/router_health.md says how
to read them.

They are taken in two steps. :func:`routing_sums` makes a vector of one layer's decisions whose sum over micro-batches
and ranks means the same for all of them together; :func:`layer_record` and :func:`pooled_record` make figures of sums.

Letters: ``N`` routed items (tokens, or features of all sequences), ``E`` experts, ``K`` choices of an item, ``A``
assignments, ``S`` = E + len(FIELDS).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from smlp.moe.plan import RoutingPlan
from smlp.nn.state import Observation

#: causes of dropped choices, as in ``RoutingPlan.dropped``
DROP_CAUSES = ("capacity", "second_expert")

#: an assignment with a smaller weight (alpha) hardly uses its expert
LOW_ALPHA = 0.05

#: what a vector of sums holds after the assignments of each expert. ``scored`` items have gate scores, ``probed`` ones
#: were compared with their choice at the last log, ``weighed`` assignments have a weight; ``at_risk_*`` choices could
#: have been dropped for that cause
FIELDS = (
    *("items", "choices", "unassigned", "scored", "gate_entropy", "margin", "probed", "changed"),
    *("weighed", "alpha", "alpha_low"),
    *(f"{count}_{cause}" for cause in DROP_CAUSES for count in ("dropped", "at_risk")),
)

#: pooling of layers' figures other than by the mean
_POOLED_BY: dict[str, Callable[[Sequence[float]], float]] = {
    "load_min": min,
    "load_max": max,
    "min_over_mean": min,
    "max_over_mean": max,
    "dead_experts": sum,
}


def first_choices(plan: RoutingPlan) -> Tensor:
    """Return the expert that each item chose first, dropped or not, (N,); -1 for an item without any."""
    if plan.choice_NK is not None:
        return plan.choice_NK[:, 0]
    expert_N = plan.token_A.new_full((plan.num_tokens,), -1)
    expert_N[plan.token_A] = plan.expert_A
    return expert_N


def gate_entropy_and_margin(logits_NE: Tensor) -> tuple[Tensor, Tensor]:
    """Return the entropy in nats of the softmax of each item's scores, and its two largest probabilities' gap, (N,).

    With E = 1 these are 0 and 1.
    """
    probs_NE = logits_NE.double().softmax(dim=1)
    best_NK = probs_NE.topk(min(2, probs_NE.size(1)), dim=1).values
    return torch.special.entr(probs_NE).sum(dim=1), best_NK[:, 0] - (best_NK[:, 1] if best_NK.size(1) > 1 else 0)


def routing_sums(observation: Observation, probe: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Return what one layer did in one forward pass, as numbers that can be added up over passes and ranks.

    Args:
        observation: of the layer.
        probe: first choices of the probe set's items at the last log and now, (M,) each; None where there are not two.

    Returns:
        (S,), float64: the assignments of each expert, then :data:`FIELDS`.
    """
    plan, logits_NE = observation.plan, observation.logits_NE
    num_choices = plan.num_tokens if plan.choice_NK is None else plan.choice_NK.numel()
    fields: dict[str, Tensor | int] = dict.fromkeys(FIELDS, 0)
    fields["items"], fields["choices"] = plan.num_tokens, num_choices
    fields["unassigned"] = plan.num_tokens - plan.token_A.unique().numel()
    if logits_NE is not None and plan.num_experts > 1:
        entropy_N, margin_N = gate_entropy_and_margin(logits_NE)
        fields |= {"scored": plan.num_tokens, "gate_entropy": entropy_N.sum(), "margin": margin_N.sum()}
    if observation.weight_A is not None:
        alpha_A = observation.weight_A.double()
        fields |= {"weighed": alpha_A.numel(), "alpha": alpha_A.sum(), "alpha_low": (alpha_A < LOW_ALPHA).sum()}
    for cause, num_dropped in plan.dropped.items():
        fields |= {f"dropped_{cause}": num_dropped, f"at_risk_{cause}": num_choices}
    if probe is not None:
        before_M, now_M = probe
        fields |= {"probed": now_M.numel(), "changed": (before_M != now_M).sum()}
    assert tuple(fields) == FIELDS, f"unknown causes of dropping: {sorted(plan.dropped)}"
    counts_E = plan.counts_E.double()
    rest = torch.stack(
        [torch.as_tensor(value, dtype=torch.double, device=counts_E.device) for value in fields.values()]
    )
    return torch.cat([counts_E, rest])


def num_sums(num_experts: int) -> int:
    """Return S, the length of a vector of sums."""
    return num_experts + len(FIELDS)


def layer_record(sums_S: Tensor) -> dict[str, float]:
    """Compute the figures of one layer from its sums, those that its router has; see docs/router_health.md."""
    sums = sums_S.double().tolist()
    num_experts = len(sums) - len(FIELDS)
    loads, fields = [int(load) for load in sums[:num_experts]], dict(zip(FIELDS, sums[num_experts:], strict=True))
    total = sum(loads)
    record: dict[str, float] = {
        "num_experts": num_experts,
        "num_items": int(fields["items"]),
        "num_assignments": total,
        "load_min": min(loads),
        "load_max": max(loads),
    }
    if total > 0:
        mean = total / num_experts
        variance = sum((load - mean) ** 2 for load in loads) / num_experts
        record |= {
            "load_cv": math.sqrt(variance) / mean,
            "min_over_mean": min(loads) / mean,
            "max_over_mean": max(loads) / mean,
            "dead_experts": loads.count(0),
            "load_entropy": -sum(load / total * math.log(load / total) for load in loads if load > 0),
        }
    at_risk = [cause for cause in DROP_CAUSES if fields[f"at_risk_{cause}"] > 0]
    if at_risk:
        record["drop_share"] = sum(fields[f"dropped_{cause}"] for cause in at_risk) / fields["choices"]
        record |= {f"drop_share_{cause}": fields[f"dropped_{cause}"] / fields[f"at_risk_{cause}"] for cause in at_risk}
        record["unassigned_share"] = fields["unassigned"] / fields["items"]
    if fields["scored"] > 0:
        record |= {name: fields[name] / fields["scored"] for name in ("gate_entropy", "margin")}
    if fields["weighed"] > 0:
        record["alpha_mean"] = fields["alpha"] / fields["weighed"]
        record["alpha_low_share"] = fields["alpha_low"] / fields["weighed"]
    if fields["probed"] > 0:
        record["churn"] = fields["changed"] / fields["probed"]
    return record


def pooled_record(records: Sequence[dict[str, float]]) -> dict[str, float]:
    """Merge the records of all layers: the mean of each figure over the layers that have it.

    Of ``load_min`` and ``min_over_mean`` it is the smallest, of ``load_max`` and ``max_over_mean`` the largest, and of
    ``dead_experts`` the sum.
    """
    pooled = {}
    names = [name for record in records for name in record if not name.startswith("num_")]
    for name in dict.fromkeys(names):
        values = [record[name] for record in records if name in record]
        pooled[name] = _POOLED_BY[name](values) if name in _POOLED_BY else sum(values) / len(values)
    return pooled
