"""Models whose experts are spread over ranks against the same model in one process."""

import pytest
from rank_cases import ARCHS
from rank_running import run_ranks

pytestmark = [pytest.mark.long, pytest.mark.timeout(120)]

SPARSE = [arch for arch in ARCHS if arch not in ("dense", "gmlp")]
# without expert parallelism, architectures differ in one process already
LAYOUTS = [(2, 1, ["smlp", "switch", "dense", "gmlp"]), (2, 2, SPARSE), (4, 1, ["smlp"])]
LAYOUTS += [(4, 2, SPARSE), (4, 4, SPARSE)]


@pytest.mark.parametrize(("world", "group_size", "archs"), LAYOUTS)
def test_training_is_the_same_as_in_one_process(world, group_size, archs):
    """With dropout, unequal batches, padding, and ranks without a batch."""
    norms = run_ranks("same_as_one_process", world, group_size=group_size, archs=archs, updates=3)
    assert norms == [norms[0]] * world, "every rank sees the same norm, bit for bit"


@pytest.mark.slow
@pytest.mark.parametrize(("world", "group_size"), [(2, 2), (4, 2)])
def test_the_same_with_activation_checkpointing(world, group_size):
    settings = {"archs": SPARSE, "updates": 2, "checkpoint_activations": True}
    run_ranks("same_as_one_process", world, group_size=group_size, **settings)


def test_the_default_layout_is_the_largest_that_fits():
    run_ranks("same_as_one_process", 3, group_size=None, archs=["smlp"], updates=2)


@pytest.mark.parametrize("group_size", [2, 4])
def test_all_tokens_go_to_one_expert_of_another_rank(group_size):
    run_ranks("all_tokens_to_one_expert", 4, group_size=group_size)


@pytest.mark.parametrize("group_size", [1, 2])
def test_gradients_of_several_micro_batches_add_up(group_size):
    run_ranks("several_micro_batches", 2, group_size=group_size)


def test_torchs_own_wrappers():
    """Also with a static graph, where torch has to find the tensors in what the model returns."""
    run_ranks("inside_torchs_wrappers", 2, archs=["smlp", "gshard", "dense"])


def test_evaluation_with_any_length_on_any_rank():
    run_ranks("evaluate", 4, group_size=4, archs=SPARSE)


def test_decoding_with_prompts_of_different_lengths():
    run_ranks("decode", 4, group_size=4, archs=["smlp", "smlp_partial", "base", "gshard"])


def test_bfloat16():
    run_ranks("half_precision", 2, group_size=2, archs=["smlp", "hash"])


@pytest.mark.parametrize("group_size", [1, 2, 4])
def test_states_of_all_experts_go_round(group_size):
    run_ranks("states_go_round", 4, group_size=group_size)


@pytest.mark.parametrize("group_size", [1, 2, 4])
def test_a_bad_gradient_on_one_rank_is_seen_by_all(group_size):
    assert run_ranks("bad_gradients", 4, group_size=group_size) == [["inf", "nan"]] * 4
