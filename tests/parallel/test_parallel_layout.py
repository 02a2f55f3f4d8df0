"""Layouts, groups of one, gradients and states, worked out by hand without processes."""

import copy

import pytest
import torch
from torch import nn

import smlp
from smlp.config.presets import preset
from smlp.errors import UserError
from smlp.moe.dispatch import LocalDispatcher, LocalFeatureDispatcher
from smlp.moe.exchange import _rows_by_expert
from smlp.moe.experts import expert_parameters
from smlp.nn.decoder import Decoder
from smlp.nn.state import DecodingState
from smlp.parallel import (
    ExpertLayout,
    LocalGroup,
    Ranks,
    connect,
    cut_state,
    global_grad_norm,
    one_process,
    reduce_expert_gradients,
    whole_state,
)

SMALL = {"vocab_size": 20, "max_tokens": 8, "embed_dim": 16, "ffn_dim": 16, "num_experts": 4}


class TwinGroup(LocalGroup):
    """Two ranks of which the other has the same numbers."""

    size = 2

    def __init__(self):
        self.pieces = []

    def all_reduce(self, x, name, operation="sum"):
        self.pieces.append((x.dtype, x.numel()))
        return x.mul_(2) if operation == "sum" else x


def test_groups_of_six_ranks_in_pairs():
    layouts = [ExpertLayout(8, 6, rank, 2) for rank in range(6)]
    assert layouts[0].expert_groups == [[0, 1], [2, 3], [4, 5]]
    assert layouts[0].replica_groups == [[0, 2, 4], [1, 3, 5]]
    assert [list(layout.expert_ids) for layout in layouts] == [[0, 1, 2, 3], [4, 5, 6, 7]] * 3
    assert [layout.position for layout in layouts] == [0, 1] * 3 and layouts[0].num_replicas == 3


@pytest.mark.parametrize(
    ("num_experts", "world_size", "group_size"), [(32, 32, 32), (64, 32, 32), (8, 12, 4), (4, 3, 1), (32, 8, 8)]
)
def test_the_default_is_the_largest_group_that_fits(num_experts, world_size, group_size):
    layout = ExpertLayout(num_experts, world_size)
    assert layout.group_size == group_size and layout.num_local == num_experts // group_size


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((8, 4, 0, 3), ["size of 3", "4 ranks", "8 experts", "is 4"]),
        ((6, 4, 0, 4), ["size of 4", "4 ranks", "6 experts", "is 2"]),
        ((8, 4, 0, 0), ["size of 0"]),
        ((8, 4, 4), ["rank 4 of 4"]),
        ((0, 1), ["0 experts"]),
    ],
)
def test_numbers_that_do_not_fit_are_named(arguments, words):
    with pytest.raises(UserError) as caught:
        ExpertLayout(*arguments)
    assert all(word in str(caught.value) for word in words), caught.value


def test_one_process_needs_nobody():
    ranks = connect(4)
    assert ranks.layout == one_process(4).layout == ExpertLayout(4) and ranks.layout.group_size == 1
    x, group = torch.randn(3, 2), ranks.experts
    assert group.all_to_all(x, [3], [3], "here") is x and group.all_reduce(x, "here") is x
    assert group.exchange_counts(x, "here") is x and group.gather(x, "here") == [x]
    with pytest.raises(UserError, match="expert-parallel size of 2"):
        connect(4, group_size=2)


def test_a_model_in_one_process_uses_local_dispatchers_and_can_be_copied():
    model = copy.deepcopy(smlp.build("smlp_tiny", **SMALL))
    dispatchers = {type(module.dispatcher) for module in model.modules() if hasattr(module, "dispatcher")}
    assert dispatchers == {LocalDispatcher, LocalFeatureDispatcher}


def test_a_model_for_another_number_of_experts_is_refused():
    with pytest.raises(UserError, match="laid out for 8 experts, but num_experts is 4"):
        Decoder(preset("smlp_tiny", **SMALL), one_process(8))


def test_spread_gated_experts_do_not_decode():
    ranks = Ranks(ExpertLayout(4, 2, 0, 2), TwinGroup(), LocalGroup(), TwinGroup())
    model = Decoder(preset("gmlp_moe_tiny", **SMALL), ranks).eval()
    layer = next(module for module in model.modules() if hasattr(module, "router"))
    layer.dispatcher.dispatch = lambda x, plan: (x, None)
    with pytest.raises(UserError, match=r"layer \d \(gMLP-MoE\).*expert-parallel size of 1"):
        model(torch.tensor([[2, 3]]), DecodingState())


def test_received_rows_by_expert():
    # rows 0 1 2 from rank 0 (two for expert 0, one for expert 2), 3 4 5 from rank 1 (one for each expert)
    assert _rows_by_expert(torch.tensor([[2, 0, 1], [1, 1, 1]])).tolist() == [0, 1, 3, 4, 2, 5]
    assert _rows_by_expert(torch.zeros(2, 3, dtype=torch.long)).tolist() == []


def test_expert_parameters_are_those_of_experts_alone():
    model = smlp.build("smlp_tiny", **SMALL)
    found = {name: (parameter, ids) for name, parameter, ids in expert_parameters(model)}
    parameters = dict(model.named_parameters())
    assert all(parameters[name] is parameter for name, (parameter, _) in found.items())
    assert {ids for _, ids in found.values()} == {range(4)}
    dense = parameters.keys() - found.keys()
    assert found and all(".experts." in name for name in found)
    assert not any(".experts." in name for name in dense)
    assert any("heads" in name for name in dense) and any("centroids" in name for name in dense)


def test_replicas_sum_their_gradients_in_pieces_of_one_dtype():
    group = TwinGroup()
    dtypes = [torch.float32, torch.float32, torch.bfloat16]
    parameters = [nn.Parameter(torch.zeros(2, 3, dtype=dtype)) for dtype in dtypes]
    parameters[0].grad, parameters[2].grad = torch.full((2, 3), 1.5), torch.ones(2, 3, dtype=torch.bfloat16)
    reduce_expert_gradients(parameters, group)
    assert [parameter.grad.unique().tolist() for parameter in parameters] == [[3], [0], [2]]
    assert group.pieces == [(torch.float32, 12), (torch.bfloat16, 6)]


def test_the_norm_counts_dense_parameters_once_and_each_expert_once():
    dense, expert = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(2))
    dense.grad, expert.grad = torch.tensor([1.0, 1, 1, 1]), torch.tensor([4.0, 2.0])
    local = LocalGroup()
    spread = Ranks(ExpertLayout(2, 2, 0, 2), TwinGroup(), local, TwinGroup())
    assert global_grad_norm([dense], [expert], spread).item() == pytest.approx((4 + 2 * 20) ** 0.5)
    replicated = Ranks(ExpertLayout(1, 2, 0, 1), local, TwinGroup(), TwinGroup())
    assert global_grad_norm([dense], [expert], replicated).item() == pytest.approx((4 + 20) ** 0.5)
    half = nn.Parameter(torch.zeros(4, dtype=torch.float16))
    half.grad = torch.full_like(half, 60000)
    assert global_grad_norm([half], [], replicated).item() == pytest.approx(120000), "no overflow in float16"


def test_states_are_cut_by_global_id():
    whole = {"a.experts.w": torch.arange(8.0).view(4, 2), "norm": torch.ones(4), "step": torch.tensor(3)}
    names = ["a.experts.w", "step", "elsewhere"]
    cut = cut_state(whole, names, ExpertLayout(4, 4, 3, 2))
    assert cut["a.experts.w"].tolist() == [[4, 5], [6, 7]] and cut["norm"] is whole["norm"] and cut["step"] == 3
    assert whole_state(whole, names, one_process(4))["a.experts.w"].equal(whole["a.experts.w"])
    with pytest.raises(UserError, match=r"a\.experts\.w holds 4 experts, but the model has 8"):
        cut_state(whole, names, ExpertLayout(8, 2))
