"""Groups and exchanges on several ranks, and what happens when one of them fails."""

import pytest
from rank_running import end_ranks, run_ranks

pytestmark = pytest.mark.timeout(120)


def test_all_to_all_moves_rows_and_their_gradients():
    run_ranks("all_to_all", 4)


def test_second_derivatives_are_refused():
    """Without a word they would be zero."""
    for said in run_ranks("second_derivatives", 2):
        assert ["once_differentiable" in one for one in said] == [True], said


def test_checkpointed_blocks_run_the_same_collectives_on_every_rank():
    assert run_ranks("checkpointed_exchange", 3) == [["call 1", "call 2", "call 1, backward"]] * 3


@pytest.mark.parametrize("num_experts", [4, 8])
def test_tokens_go_to_their_experts_and_back(num_experts):
    run_ranks("tokens_there_and_back", 4, num_experts=num_experts)


@pytest.mark.parametrize("world", [2, 4])
def test_bytes_that_leave_a_rank(world):
    num_bytes = 3 * 5 * 8 * 4
    for result in run_ranks("bytes_sent", world):
        stays = result["stays"] * 8 * 4
        features = num_bytes * (world - 1) // world
        assert result["sent"]["sMoE, dispatch"] == result["sent"]["sMoE, combine, backward"] == features
        assert result["sent"]["sMoE, combine"] == result["sent"]["sMoE, dispatch, backward"] == features
        assert result["sent"]["tMoE, dispatch"] == num_bytes - stays


@pytest.mark.parametrize("case", ["other_precision", "other_layer"])
def test_ranks_that_do_not_fit_together_all_say_so(case):
    ended = end_ranks(case, 4)
    assert ended.codes == [1] * 4
    wanted = {
        "other_precision": ["rank 1 has", "torch.float32", "torch.float64", "layer 1 (tMoE)", "(.., 16)"],
        "other_layer": ["rank 0 has", "layer 5 (tMoE)", "layer 3 (tMoE)", "(.., 16)"],
    }[case]
    for text in ended.errors:
        message = text.strip().splitlines()[-1]
        assert "ParallelError" in message and all(part in message for part in wanted), message


@pytest.mark.parametrize("how", ["dies", "raises", "stops", "ends early"])
def test_no_rank_waits_for_one_that_is_gone(how):
    ended = end_ranks("one_rank_fails", 4, how=how, seconds=2)
    assert ended.codes[1] == {"dies": -9, "raises": 1, "stops": 0, "ends early": 0}[how]
    for rank in (0, 2, 3):
        assert ended.codes[rank] == 1 and ended.seconds[rank] < 20
        message = ended.errors[rank].strip().splitlines()[-1]
        assert "ParallelError: " in message and f"rank {rank} " in message
        assert "(" in message
