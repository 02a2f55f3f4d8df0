"""Run Adam in one pass over parameters and moments, on a CPU or a GPU; fairseq's takes nine.

The formula is fairseq's (Kingma and Ba, 2015; decay apart from the gradient, Loshchilov and Hutter, 2019): its epsilon
is added to the square root of the second moment before the bias is corrected, torch's after, so that torch's kernel is
given ``eps / sqrt(1 - beta2^t)``. Results differ from fairseq's by rounding; states are the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from smlp.fairseq_compat.replacing import replacing
from smlp.ops.fast_paths import fuses_adam


def apply() -> None:
    from fairseq.optim.adam import Adam

    @replacing(Adam, "step")
    def step(step_by_step: Any, self: Adam, closure: Callable[[], Any] | None = None) -> Any:
        groups = self.param_groups
        learnt = [p for group in groups for p in group["params"] if p.grad is not None]
        if closure is not None or any(group.get("amsgrad") for group in groups) or not fuses_adam(learnt):
            return step_by_step(self, closure)
        for group in groups:
            _update(group, self.state)
        return None


@torch.no_grad()
def _update(group: dict[str, Any], states: dict[Tensor, dict[str, Any]]) -> None:
    """Update a group's parameters and their moments once."""
    parameters_of: dict[tuple[int, torch.device], list[Tensor]] = defaultdict(list)
    for parameter in group["params"]:
        if parameter.grad is None:
            continue
        state = states[parameter]
        if not state:
            state["step"] = 0
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = state[name].to(parameter)
        state["step"] += 1
        parameters_of[state["step"], parameter.device].append(parameter)
    beta1, beta2 = group["betas"]
    for (step, device), parameters in parameters_of.items():
        adamw(
            parameters,
            [parameter.grad for parameter in parameters],
            [states[parameter]["exp_avg"] for parameter in parameters],
            [states[parameter]["exp_avg_sq"] for parameter in parameters],
            [],
            list(torch.full((len(parameters),), float(step - 1), device=device)),  # the kernel increments them
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"] / (1 - beta2**step) ** 0.5,
            maximize=False,
        )
