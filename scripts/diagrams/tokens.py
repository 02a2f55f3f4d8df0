"""Routers of tokens: which token goes to which expert, by the package's own code on one small example.

Letters: ``N`` tokens, ``E`` experts, ``K`` choices of each token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from diagrams.style import EXPERTS, GREY, INK, PALE, WARNING, Drawing, light
from smlp.moe.plan import RoutingPlan, expert_capacity
from smlp.moe.routers.hashed import random_table
from smlp.moe.routers.top_k import top_k_choices
from smlp.ops import balanced_assignment

WORDS = ("the", "cat", "and", "the", "dog", "ran", "and", "hid")
NUM_EXPERTS = 4
# Made-up scores: two experts are the first choice of more tokens than they have capacity for.
SCORES_NE = torch.tensor(
    [
        [2.4, 0.9, 0.2, 0.4],
        [0.3, 2.2, 1.5, 0.1],
        [2.0, 0.4, 1.1, 0.6],
        [2.3, 1.2, 0.3, 0.5],
        [0.4, 2.1, 1.8, 0.2],
        [0.2, 0.5, 0.9, 1.9],
        [1.9, 0.2, 0.7, 1.4],
        [0.6, 1.6, 0.8, 1.3],
    ]
)
_ROW, _TOP = 2.9, 6.2  # height of a token's row; where the first begins
_CELL = 2.6
_PLAIN = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}


def _middle(row: int) -> float:
    """Return the middle of a token's row."""
    return _TOP + row * _ROW + (_ROW - 0.6) / 2


def training_plan(num_choices: int) -> RoutingPlan:
    """Return the plan of first (and second) choices, with a capacity of ``K * N / E`` tokens per expert."""
    choice_NK = top_k_choices(SCORES_NE, num_choices)
    capacity = expert_capacity(1.0, num_choices, len(WORDS), NUM_EXPERTS)
    return RoutingPlan.from_choices(choice_NK, NUM_EXPERTS, capacity)


def evaluation_plan(num_choices: int) -> RoutingPlan:
    """Return the plan with capacity for every choice."""
    return RoutingPlan.from_choices(top_k_choices(SCORES_NE, num_choices), NUM_EXPERTS)


def _draw_tokens(page: Drawing, x: float) -> None:
    for row, word in enumerate(WORDS):
        page.box(x, _TOP + row * _ROW, 5.0, _ROW - 0.6, word, GREY)


def _draw_scores(page: Drawing, x: float, choice_NK: Tensor) -> None:
    """Draw scores as squares, darker for higher ones, with a thick frame around the choices."""
    page.text(x + 2 * _CELL, _TOP - 2.6, "scores of experts", 8, GREY)
    for expert in range(NUM_EXPERTS):
        page.text(x + (expert + 0.5) * _CELL, _TOP - 0.9, str(expert + 1), 8, EXPERTS[expert], weight="bold")
    for row, scores in enumerate(SCORES_NE.tolist()):
        y = _TOP + row * _ROW
        for expert, score in enumerate(scores):
            chosen = expert in choice_NK[row].tolist()
            fill = light(INK, 0.04 + 0.16 * score)
            page.box(x + expert * _CELL + 0.15, y, _CELL - 0.3, _ROW - 0.6, "", "white", fill)
            if chosen:
                page.frame(x + expert * _CELL + 0.15, y, _CELL - 0.3, _ROW - 0.6, EXPERTS[expert])
            page.text(x + (expert + 0.5) * _CELL, y + (_ROW - 0.6) / 2, f"{score:.1f}", 7, INK)


def _draw_experts(page: Drawing, x: float, plan: RoutingPlan, starts: list[tuple], capacity: int) -> None:
    """Draw experts with their capacity, and a line from each token to the experts that got it."""
    height = len(WORDS) * _ROW / NUM_EXPERTS
    width = 0.8 + capacity * 4.2
    taken = [0] * NUM_EXPERTS
    rank_A = plan.rank_A.tolist() if plan.rank_A is not None else [0] * plan.token_A.numel()
    for expert in range(NUM_EXPERTS):
        y = _TOP + expert * height
        page.box(x, y, width, height - 0.9, "", EXPERTS[expert], light(EXPERTS[expert], 0.12))
        page.text(x + 0.6, y + 1.0, f"expert {expert + 1}", 8, EXPERTS[expert], ha="left", weight="bold")
        for slot in range(capacity):
            page.box(x + 0.6 + slot * 4.2, y + 2.0, 3.8, 2.3, "", GREY, "white", dashed=True)
    for token, expert, rank in zip(plan.token_A.tolist(), plan.expert_A.tolist(), rank_A, strict=True):
        y = _TOP + expert * height
        slot_x = x + 0.6 + taken[expert] * 4.2
        taken[expert] += 1
        page.box(slot_x, y + 2.0, 3.8, 2.3, WORDS[token], EXPERTS[expert], light(EXPERTS[expert], 0.3), 8)
        end = (x - 0.2, y + height / 2 - 0.5)
        page.arrow(starts[token], end, EXPERTS[expert], 1.3 if rank == 0 else 0.8, rank == 1)


def _panel(page: Drawing, x: float, title: str, plan: RoutingPlan, choice_NK: Tensor, capacity: int) -> None:
    page.text(x, 1.4, title, 9.5, ha="left", weight="bold")
    _draw_tokens(page, x)
    _draw_scores(page, x + 5.7, choice_NK)
    edge = x + 5.9 + NUM_EXPERTS * _CELL
    _draw_experts(page, x + 23.6, plan, [(edge, _middle(row)) for row in range(len(WORDS))], capacity)
    without = sorted(set(range(len(WORDS))) - set(plan.token_A.tolist()))
    for token in without:
        page.text(edge + 0.3, _middle(token), "dropped", 8, WARNING, ha="left", zorder=5, bbox=_PLAIN)


def _page(capacities: tuple[int, int]) -> tuple[Drawing, tuple[float, float]]:
    """Return a page for two panels whose experts have these capacities, and where the panels begin."""
    widths = [26.1 + 4.2 * capacity for capacity in capacities]
    return Drawing(sum(widths) + 3.5, _TOP + len(WORDS) * _ROW + 3.4), (1.2, widths[0] + 3.4)


def _note(page: Drawing, x: float, words: str) -> None:
    page.text(x, _TOP + len(WORDS) * _ROW + 1.2, words, 8, GREY, ha="left")


def base() -> Drawing:
    """Draw balanced assignment in training, the best expert in evaluation."""
    expert_N = balanced_assignment(SCORES_NE)
    page, (left, right) = _page((2, 4))
    training = RoutingPlan.from_experts(expert_N, NUM_EXPERTS)
    _panel(page, left, "training: all tokens together", training, expert_N.unsqueeze(1), 2)
    best_N = SCORES_NE.argmax(dim=1)
    _panel(page, right, "evaluation: each token by itself", evaluation_plan(1), best_N.unsqueeze(1), 4)
    _note(page, left, "N/E tokens for each, with the largest sum of scores")
    _note(page, right, "the highest score; loads are uneven")
    return page


def switch() -> Drawing:
    """Draw the best expert, within its capacity."""
    page, (left, right) = _page((2, 4))
    choice_NK = top_k_choices(SCORES_NE, 1)
    _panel(page, left, "training: capacity ceil(1.0 * N/E) = 2", training_plan(1), choice_NK, 2)
    _panel(page, right, "evaluation: no limit", evaluation_plan(1), choice_NK, 4)
    _note(page, left, "dropped: the residual alone, nothing added")
    _note(page, right, "nothing is dropped, unless --eval-capacity-factor says so")
    return page


def gshard() -> Drawing:
    """Draw the two best experts; all first choices come before any second one."""
    page, (left, right) = _page((4, 5))
    choice_NK = top_k_choices(SCORES_NE, 2)
    _panel(page, left, "training: capacity ceil(1.0 * 2 N/E) = 4", training_plan(2), choice_NK, 4)
    _panel(page, right, "evaluation: no limit", evaluation_plan(2), choice_NK, 5)
    _note(page, left, "solid: first choices. Dashed: second ones, placed last")
    _note(page, right, "weights: the two gates of a token, which add up to 1")
    return page


def hashed() -> Drawing:
    """Draw the expert that a table names for the token's id."""
    vocabulary = sorted(set(WORDS))
    table_V = random_table(len(vocabulary), NUM_EXPERTS, seed=1)
    expert_N = torch.tensor([table_V[vocabulary.index(word)].item() for word in WORDS])
    plan = RoutingPlan.from_experts(expert_N, NUM_EXPERTS)
    capacity = int(plan.counts_E.max())
    page = Drawing(27.5 + 4.2 * capacity, _TOP + len(WORDS) * _ROW + 0.6)
    title = "training and evaluation: a fixed table"
    page.text(1.2, 1.4, title, 9.5, ha="left", weight="bold")
    _draw_tokens(page, 1.2)
    page.text(13.4, _TOP - 1.2, "token id: expert", 8, GREY)
    for row, word in enumerate(vocabulary):
        color, y = EXPERTS[int(table_V[row])], _TOP + row * _ROW
        page.box(10, y, 4.6, _ROW - 0.6, word, GREY, PALE, 8)
        page.box(14.6, y, 2.2, _ROW - 0.6, str(int(table_V[row]) + 1), color, light(color, 0.3), 8)
    rows = [vocabulary.index(word) for word in WORDS]
    for token, row in enumerate(rows):
        page.arrow((6.3, _middle(token)), (9.9, _middle(row)), GREY, 0.7)
    _draw_experts(page, 25, plan, [(16.9, _middle(row)) for row in rows], capacity)
    return page
