"""Figures of routing, by hand-worked cases."""

import math

import pytest
import torch

from smlp.moe.balance import (
    FIELDS,
    first_choices,
    gate_entropy_and_margin,
    layer_record,
    num_sums,
    pooled_record,
    routing_sums,
)
from smlp.moe.plan import RoutingPlan
from smlp.nn.state import Observation

LN2 = math.log(2)


def gate(*rows):
    """Scores whose softmax are these rows; a shift of all scores of an item changes nothing."""
    return torch.tensor(rows).log() + 3.0


def top_2_plan():
    """Five tokens, three experts, two places each; token 4 gives its second choice up before places are taken.

    Queue: first choices 0 0 0 1 2, then second choices 1 2 1 0. Expert 0 takes tokens 0 and 1 and drops token 2, and
    token 3 in second place; expert 1 takes 3 and 0 and drops 2; expert 2 takes 4 and 1.
    """
    choice_NK = torch.tensor([[0, 1], [0, 2], [0, 1], [1, 0], [2, 0]])
    wanted_NK = torch.ones(5, 2, dtype=torch.bool)
    wanted_NK[4, 1] = False
    return RoutingPlan.from_choices(choice_NK, 3, capacity=2, wanted_NK=wanted_NK)


def test_drops_by_cause_and_tokens_without_an_expert():
    record = layer_record(routing_sums(Observation(top_2_plan(), None)))
    assert record["num_items"] == 5 and record["num_assignments"] == 6
    assert (record["load_min"], record["load_max"], record["load_cv"]) == (2, 2, 0)
    assert record["drop_share_capacity"] == pytest.approx(3 / 10)
    assert record["drop_share_second_expert"] == pytest.approx(1 / 10)
    assert record["drop_share"] == pytest.approx(4 / 10)
    assert record["unassigned_share"] == pytest.approx(1 / 5), "token 2 has lost both"


def test_loads():
    plan = RoutingPlan.from_experts(torch.tensor([0, 0, 0, 0, 1, 1, 3, 3]), 4)
    record = layer_record(routing_sums(Observation(plan, None)))
    assert (record["num_experts"], record["load_min"], record["load_max"], record["dead_experts"]) == (4, 0, 4, 1)
    assert (record["min_over_mean"], record["max_over_mean"]) == (0, 2)
    assert record["load_cv"] == pytest.approx(math.sqrt(2) / 2)  # deviations 2, 0, -2, 0 from a mean of 2
    assert record["load_entropy"] == pytest.approx(1.5 * LN2)  # shares 1/2, 1/4, 0, 1/4


def test_gate_entropy_and_margin():
    logits = gate((0.5, 0.25, 0.25), (1 / 3, 1 / 3, 1 / 3))
    entropy, margin = gate_entropy_and_margin(logits)
    assert entropy.tolist() == pytest.approx([1.5 * LN2, math.log(3)], abs=1e-6)
    assert margin.tolist() == pytest.approx([0.25, 0], abs=1e-6)
    certain, margin = gate_entropy_and_margin(torch.tensor([[1e4, 0.0, -1e4]]))
    assert (certain.item(), margin.item()) == (0, 1)
    plan = RoutingPlan.from_experts(torch.tensor([0, 1]), 3)
    record = layer_record(routing_sums(Observation(plan, logits)))
    assert record["gate_entropy"] == pytest.approx((1.5 * LN2 + math.log(3)) / 2, abs=1e-6)
    assert record["margin"] == pytest.approx(0.125, abs=1e-6)


def test_alpha():
    plan = RoutingPlan.from_experts(torch.tensor([0, 1, 1, 0]), 2)
    record = layer_record(routing_sums(Observation(plan, None, torch.tensor([0.9, 0.01, 0.049, 0.05]))))
    assert record["alpha_mean"] == pytest.approx(1.009 / 4) and record["alpha_low_share"] == 0.5


def test_what_makes_no_sense_is_absent():
    plan = RoutingPlan.from_experts(torch.tensor([0, 1, 1]), 2)
    fixed = layer_record(routing_sums(Observation(plan, None)))
    assert not fixed.keys() & {"gate_entropy", "margin", "drop_share", "unassigned_share", "churn", "alpha_mean"}
    one_choice = RoutingPlan.from_choices(torch.tensor([[0], [0]]), 2, capacity=1)
    switch = layer_record(routing_sums(Observation(one_choice, torch.zeros(2, 2))))
    assert switch["drop_share"] == switch["drop_share_capacity"] == 0.5
    assert "drop_share_second_expert" not in switch
    alone = RoutingPlan.from_experts(torch.zeros(3, dtype=torch.long), 1)
    record = layer_record(routing_sums(Observation(alone, torch.zeros(3, 1))))
    assert "gate_entropy" not in record and "margin" not in record and record["load_entropy"] == 0


def test_a_layer_without_tokens():
    nothing = torch.empty(0, 1, dtype=torch.long)
    sums = routing_sums(Observation(RoutingPlan.from_choices(nothing, 4, capacity=1), torch.empty(0, 4)))
    record = layer_record(sums)
    assert record == {"num_experts": 4, "num_items": 0, "num_assignments": 0, "load_min": 0, "load_max": 0}


def test_sums_of_parts_are_the_sums_of_the_whole():
    torch.manual_seed(0)
    expert_N, logits_NE = torch.randint(5, (40,)), torch.randn(40, 5)

    def sums(rows):
        return routing_sums(Observation(RoutingPlan.from_experts(expert_N[rows], 5), logits_NE[rows]))

    parts = sums(slice(0, 7)) + sums(slice(7, 40))
    assert parts.dtype == torch.double and parts.shape == (num_sums(5),) == (5 + len(FIELDS),)
    torch.testing.assert_close(parts, sums(slice(0, 40)))
    assert layer_record(parts) == pytest.approx(layer_record(sums(slice(0, 40))))


def test_churn_and_first_choices():
    assert first_choices(top_2_plan()).tolist() == [0, 0, 0, 1, 2], "a dropped choice is a choice"
    sparse = RoutingPlan(torch.tensor([2, 0]), torch.tensor([0, 1]), torch.tensor([1, 1]), num_tokens=3)
    assert first_choices(sparse).tolist() == [1, -1, 0]
    observation = Observation(RoutingPlan.from_experts(torch.tensor([0, 1, 1]), 2), None)
    probe = (torch.tensor([0, 1, 1, 0]), torch.tensor([0, 0, 1, 1]))
    assert layer_record(routing_sums(observation, probe))["churn"] == 0.5


def test_an_unknown_cause_of_dropping_is_not_lost():
    plan = RoutingPlan(torch.tensor([0]), torch.tensor([0]), torch.tensor([1]), 2, dropped={"whim": 1})
    with pytest.raises(AssertionError, match="whim"):
        routing_sums(Observation(plan, None))


def test_pooling():
    records = [
        {"num_experts": 2, "load_min": 3, "load_max": 9, "load_cv": 0.5, "dead_experts": 0, "churn": 0.25},
        {"num_experts": 2, "load_min": 0, "load_max": 5, "load_cv": 1.0, "dead_experts": 1},
    ]
    expected = {"load_min": 0, "load_max": 9, "load_cv": 0.75, "dead_experts": 1, "churn": 0.25}
    assert pooled_record(records) == expected
    assert pooled_record([]) == {}
