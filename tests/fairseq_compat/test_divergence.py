"""A run whose numbers are no longer finite ends on every rank in one sentence, and says where it began."""

from __future__ import annotations

import dataclasses
import math
import re

import pytest
import torch
from layouts import command
from tiny_decoders import make
from torch import nn

from smlp.fairseq_compat.divergence import FirstNaN, damaged_weights
from smlp.moe.routers import ExpertOffsets

pytestmark = pytest.mark.timeout(200)

#: in warnings at the start, which say among others that --amp does nothing without a GPU
OF_TORCH = ("fairscale", "torch.cuda.amp.", "torch/cuda/amp/", "super().__init__(")
FAR = ["--lr", 1e30, "--clip-norm", 0]
IN_UPDATE = r"update 2: gradients are not finite, first in the output of decoder\.core\.\S+; training has diverged: "
IN_LAYER = r"update 2.*: layer \d \([st]MoE\): \d+ of \d+ tokens have NaN routing scores; .* diverged: lower --lr"
OVERFLOWING = ["--lr", 1e39, "--max-update", 1]  # infinite in float32
NOT_SAVED = r"no checkpoint is written with [\d,]+ of [\d,]+ weights of decoder\.core\.\S+ not finite; training has "
#: architecture, ranks, options, and what each rank says
DIVERGING = {
    "gmlp_lm": ("gmlp_lm", 1, FAR, IN_UPDATE),
    "hash_lm": ("hash_lm", 1, FAR, IN_UPDATE),
    "smlp": ("smlp", 1, FAR, IN_LAYER),
    "smlp_partial": ("smlp_partial", 1, FAR, IN_LAYER),
    "hash_lm on two ranks": ("hash_lm", 2, FAR, r"rank \d, " + IN_UPDATE),
    "dense_lm on two ranks": ("dense_lm", 2, [*FAR, "--ddp-backend", "pytorch_ddp"], r"rank \d, " + IN_UPDATE),
    "amp": ("dense_lm", 1, [*FAR, "--amp"], IN_UPDATE),
    "validation": (
        "dense_lm",
        1,
        [*FAR, "--validate-interval-updates", 1, "--max-update", 1],
        r"validation after update 1: the loss is nan; training has diverged: ",
    ),
    # the loss of the last update is finite, what it makes of the weights is not
    "saving": ("smlp", 1, OVERFLOWING, r"after update 1: " + NOT_SAVED),
    "saving from two ranks": ("smlp", 2, OVERFLOWING, r"rank \d, after update 1: " + NOT_SAVED),
}


@pytest.fixture(scope="module")
def runs(tiny_data, tmp_path_factory, run_fairseq_many) -> dict:
    cases, folders = [], tmp_path_factory.mktemp("diverging")
    for name, (arch, world, options, _) in DIVERGING.items():
        case = command(tiny_data, arch, world, world if "dense" not in arch else 1, *options)
        args = [argument for argument in case["args"] if argument != "--disable-validation" or "saving" in name]
        cases.append({**case, "args": [*args, "--save-dir", folders / name]})
    runs = dict(zip(DIVERGING, run_fairseq_many(cases, timeout=180), strict=True))
    assert not list(folders.rglob("checkpoint*.pt")), "no checkpoint has weights that are not finite"
    return runs


@pytest.mark.parametrize("name", DIVERGING)
def test_every_rank_says_so_in_one_sentence(runs, name: str) -> None:
    run = runs[name]
    for code, _, message in run.ranks:
        lines = [line for line in message.splitlines() if not any(mark in line for mark in OF_TORCH)]
        assert code == 1 and len(lines) == 1, message
        assert re.search("smlp: error: " + DIVERGING[name][3], lines[0]), lines[0]


@dataclasses.dataclass
class Result:
    values: list[dict[str, torch.Tensor]]


class Layer(nn.Module):
    """Its output is a dataclass, as those of routers are."""

    def __init__(self, forward: float = 1.0, backward: float = 1.0) -> None:
        super().__init__()
        self.forward_factor, self.backward_factor = forward, backward

    def forward(self, given: Result | torch.Tensor) -> Result:
        x = given if isinstance(given, torch.Tensor) else given.values[0]["x"]
        mask = torch.full((2,), -math.inf)
        if x.requires_grad and self.backward_factor != 1:
            x = x * 1
            x.register_hook(lambda grad: grad * self.backward_factor)
        return Result([{"x": x * self.forward_factor}, {"mask": mask}])


@pytest.mark.parametrize(
    ("layers", "place"),
    [
        ([(1, 1), (math.nan, 1), (math.inf, 1)], "first in the output of 1"),
        ([(1, 1), (1, math.inf), (1, 1)], "first in the gradient of the output of 0"),
        ([(1, 1), (1, 1), (1, 1)], ""),
    ],
)
def test_the_first_module_is_named(layers: list[tuple[float, float]], place: str) -> None:
    """Of any structure of outputs; the hooks are gone afterwards."""
    model = nn.Sequential(*[Layer(*factors) for factors in layers])
    found: list[str] = []
    with FirstNaN(model, found.append):
        model(torch.ones(3, requires_grad=True)).values[0]["x"].sum().backward()
    assert found == [place] * bool(place)
    assert not any(module._forward_hooks for module in model.modules())


def test_damaged_weights_are_named() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    assert damaged_weights(model) == ""
    with torch.no_grad():
        model[1].weight[0] = math.nan
    assert damaged_weights(model) == "with 3 of 6 weights of 1.weight not finite"


def test_damaged_offsets_of_experts_are_named() -> None:
    model = nn.ModuleDict({"core": make("smlp, offsets")})
    model["core"].register_buffer("mask", torch.tensor([-math.inf, 0.0]))
    model["core"].register_buffer("table", torch.tensor([math.nan]), persistent=False)
    assert damaged_weights(model) == ""
    name, offsets = next((n, m) for n, m in model.named_modules() if isinstance(m, ExpertOffsets))
    offsets.rate = math.nan
    offsets.adjust(torch.tensor([*range(offsets.value.numel()), 1.0]))
    count = offsets.value.numel()
    assert damaged_weights(model) == f"with {count} of {count} weights of {name}.value not finite"
    offsets.value.fill_(-math.inf)
    assert damaged_weights(model) == f"with {count} of {count} weights of {name}.value not finite"
