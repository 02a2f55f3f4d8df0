"""Routers and experts that show misrouting, a projection that leaks, and sparse layers computed one token at a time."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from smlp.moe.plan import RoutingPlan
from smlp.moe.routers import Routing

ACTIVATIONS = {"gelu": F.gelu, "relu": F.relu, "swish": F.silu}


def unmasked_projection(x, weight, bias, start=0, gate=None, is_lower=False):
    """A spatial projection that sees later positions too."""
    n = x.size(1)
    out = torch.einsum("hts,bshc->bthc", weight[:, :n, :n], x) + bias[:, :n].t().unsqueeze(2)
    return out if gate is None else gate * out


class RoundRobinRouter(nn.Module):
    """Token i to expert i mod E with weight one."""

    def __init__(self, num_experts):
        super().__init__()
        self.num_experts = num_experts

    def forward(self, x_NH, token_ids_N, plan=None):
        plan = plan or RoutingPlan.from_experts(torch.arange(x_NH.size(0)) % self.num_experts, self.num_experts)
        return Routing(plan, torch.ones(plan.token_A.numel()))


class FixedRouter(RoundRobinRouter):
    """All tokens to one expert."""

    def forward(self, x_NH, token_ids_N, plan=None):
        everyone = torch.full((x_NH.size(0),), self.num_experts - 1)
        plan = plan or RoutingPlan.from_experts(everyone, self.num_experts)
        return Routing(plan, torch.ones(plan.token_A.numel()))


class ScalingExperts(nn.Module):
    """Expert i multiplies by i + 1."""

    def forward(self, x_AH, counts):
        scale = torch.repeat_interleave(torch.arange(1, len(counts) + 1), torch.tensor(counts))
        return x_AH * scale.unsqueeze(1)


def randomised(module, seed=0):
    """The module in float64 with every parameter of ordinary size, so that every gradient is large enough to see."""
    generator = torch.Generator().manual_seed(seed)
    module = module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.double))
    return module


def feed_forward_expert(experts, expert, x_H):
    """One token through one of the ``FeedForwardExperts``."""
    if experts.norm_weight is not None:
        x_H = F.layer_norm(x_H, x_H.shape, experts.norm_weight[expert], experts.norm_bias[expert])
    hidden_F = ACTIVATIONS[experts.activation](experts.w1[expert] @ x_H + experts.b1[expert])
    return experts.w2[expert] @ hidden_F + experts.b2[expert]


def top_k_draws(settings, x_NH, num_experts):
    """The random numbers of a top-k router in training, under the present seed: jitter (N, H), second choices."""
    jitter_NH, noise = torch.ones_like(x_NH), None
    if settings.router_jitter:
        jitter_NH = torch.empty_like(x_NH).uniform_(1 - settings.router_jitter, 1 + settings.router_jitter)
    if settings.num_choices == 2 and settings.second_expert == "sampled":
        noise = -torch.empty(x_NH.size(0), num_experts, dtype=x_NH.dtype).exponential_().log()
    if settings.num_choices == 2 and settings.second_expert == "random":
        noise = torch.rand(x_NH.size(0), dtype=x_NH.dtype)
    return jitter_NH, noise


@dataclass
class SlowTopK:
    """What :func:`slow_top_k` decided, token by token."""

    #: (N, H)
    outputs: torch.Tensor
    #: weighted sums, by name
    aux_losses: dict
    #: (token, choice) pairs that found a place
    placed: list
    #: (token, choice) pairs that were given up beforehand
    skipped: list
    #: (token, choice) pairs that found no place
    full: list


def slow_top_k(router, experts, x_NH, jitter_NH, noise, capacity_factor):
    """Switch and GShard for one token after the other: Fedus et al., 2021; Lepikhin et al., 2020, algorithm 1.

    Args:
        router: a ``TopKRouter``, of which the weight and the settings are used.
        experts: ``FeedForwardExperts``.
        x_NH: tokens.
        jitter_NH: factors of the gate's inputs.
        noise: for second choices: U(0, 1) (N,), Gumbel (N, E), or None.
        capacity_factor: 0 for no limit.
    """
    settings, num_tokens, num_experts = router.settings, x_NH.size(0), router.weight.size(0)
    num_choices = min(settings.num_choices, num_experts)
    logits = [[(x * jitter) @ w for w in router.weight] for x, jitter in zip(x_NH, jitter_NH, strict=True)]
    gates = [[score.exp() / sum(s.exp() for s in row) for score in row] for row in logits]
    choices, skipped = [], set()
    for i, row in enumerate(logits):
        values = [score.item() for score in row]
        chosen = [max(range(num_experts), key=lambda e, v=values: (v[e], -e))]
        if num_choices == 2:
            if settings.second_expert == "sampled" and noise is not None:
                values = [v + n for v, n in zip(values, noise[i].tolist(), strict=True)]
            others = [e for e in range(num_experts) if e != chosen[0]]
            chosen.append(max(others, key=lambda e, v=values: (v[e], -e)))
            if settings.second_expert == "random" and noise is not None:
                first, second = (gates[i][e].item() for e in chosen)
                if 2 * second / (first + second) <= noise[i].item():
                    skipped.add((i, 1))
        choices.append(chosen)
    order = list(range(num_tokens))
    if settings.drop_order == "gate":
        order.sort(key=lambda i: -max(g.item() for g in gates[i]))
    places = math.inf
    if capacity_factor:
        places = max(1, math.ceil(round(capacity_factor * num_choices * num_tokens / num_experts, 6)))
    placed, full, load = [], [], [0] * num_experts
    for k in range(num_choices):
        for i in order:
            if (i, k) in skipped:
                continue
            if load[choices[i][k]] < places:
                load[choices[i][k]] += 1
                placed.append((i, k))
            else:
                full.append((i, k))
    rows = [torch.zeros_like(x) for x in x_NH]
    for i, k in placed:
        weight = gates[i][choices[i][k]]
        if num_choices == 2:
            kept = range(2) if settings.gate_normalisation == "before_drop" else [c for j, c in placed if j == i]
            weight = weight / sum(gates[i][choices[i][c]] for c in kept)
        rows[i] = rows[i] + weight * feed_forward_expert(experts, choices[i][k], x_NH[i])
    aux_losses = {}
    if router.training and settings.load_balance_weight:
        balance = 0
        for e in range(num_experts):
            share = sum(chosen[0] == e for chosen in choices) / num_tokens
            balance = balance + share * sum(row[e] for row in gates) / num_tokens
        aux_losses["load_balance"] = settings.load_balance_weight * num_experts * balance
    if router.training and settings.router_z_weight:
        squares = [torch.stack(row).exp().sum().log() ** 2 for row in logits]
        aux_losses["router_z"] = settings.router_z_weight * sum(squares) / num_tokens
    return SlowTopK(torch.stack(rows), aux_losses, sorted(placed), sorted(skipped), sorted(full))
