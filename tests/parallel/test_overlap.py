"""Communication that overlaps with computation: the same results, the same order of collectives on every rank."""

import pytest
from rank_cases import ARCHS
from rank_running import end_ranks, run_ranks

from smlp.config import ModelConfig
from smlp.config.ignored_settings import ignored_settings
from smlp.config.presets import preset
from smlp.errors import UserError
from smlp.moe.chunked_exchange import chunk_sizes, travelling_order

pytestmark = pytest.mark.timeout(120)

SPARSE = [arch for arch in ARCHS if arch not in ("dense", "gmlp")]


@pytest.mark.parametrize(
    ("world", "group_size", "updates"), [(2, 2, 2), pytest.param(4, 2, 1, marks=pytest.mark.slow), (4, 4, 1)]
)
def test_chunks_change_nothing(world, group_size, updates):
    """Unequal batches, padding, ranks without a batch, with and without recomputation."""
    settings = {"archs": SPARSE, "num_experts": 8, "chunks": 2, "updates": updates}
    run_ranks("chunks_change_nothing", world, group_size=group_size, **settings)


def test_chunks_change_nothing_in_evaluation():
    run_ranks("chunks_change_nothing_in_evaluation", 4, archs=["smlp", "smlp_partial", "base"], rounds=2)


def test_unequal_chunks():
    settings = {"archs": SPARSE, "num_experts": 8, "chunks": 3, "updates": 1}
    run_ranks("chunks_change_nothing", 2, group_size=2, **settings)


def test_tokens_that_are_shuffled_over_ranks_first():
    settings = {"archs": ["smlp"], "num_experts": 4, "chunks": 2, "updates": 1, "base_shuffle": True}
    run_ranks("chunks_change_nothing", 2, group_size=2, **settings)


def test_inputs_without_gradients():
    """Where only experts learn, the gradients of the first sparse layer stop at them."""
    settings = {"archs": ["smlp", "hash"], "num_experts": 4, "chunks": 2, "updates": 2, "only_experts": True}
    run_ranks("chunks_change_nothing", 2, group_size=2, **settings)
    lines, _ = run_ranks("order_of_collectives", 2, archs=["hash"], chunks=2, updates=1, only_experts=True)
    back = {line.partition(", backward")[0] for line in lines if "backward" in line and "begin" in line}
    assert back == {f"begin layer {name}" for name in ("2 (tMoE), combine", "2 (tMoE), dispatch", "1 (tMoE), combine")}


def test_overlapped_training_is_the_same_as_in_one_process():
    archs = ["smlp", "smlp_partial", "gshard"]
    run_ranks("same_as_one_process", 2, group_size=2, archs=archs, updates=2, overlap_chunks=9)


def test_order_of_a_layer():
    """Experts of chunk 1 run while chunk 2 is on its way, and the other way round in the backward pass."""
    settings = {"num_dense_layers": 1, "num_sparse_layers": 1, "chunks": 2, "updates": 1}
    layer, lines = "layer 1 (tMoE)", []
    lines += [layer]
    lines += [
        f"{what} {layer}, dispatch, chunk {chunk} of 2" for what, chunk in (("begin", 1), ("begin", 2), ("wait", 1))
    ]
    lines += [f"begin {layer}, combine, chunk 1 of 2"]
    lines += [f"wait {layer}, dispatch, chunk 2 of 2"]
    lines += [
        f"{what} {layer}, combine, chunk {chunk} of 2" for what, chunk in (("begin", 2), ("wait", 1), ("wait", 2))
    ]
    back = {"dispatch": f"{layer}, dispatch, backward, chunk", "combine": f"{layer}, combine, backward, chunk"}
    lines += [f"{what} {back['combine']} {chunk} of 2" for what, chunk in (("begin", 2), ("begin", 1), ("wait", 2))]
    lines += [f"begin {back['dispatch']} 2 of 2", f"wait {back['combine']} 1 of 2", f"begin {back['dispatch']} 1 of 2"]
    lines += [f"wait {back['dispatch']} {chunk} of 2" for chunk in (1, 2)]
    assert run_ranks("order_of_collectives", 2, archs=["base"], **settings) == [lines] * 2


@pytest.mark.parametrize("settings", [{}, {"checkpoint_activations": True}], ids=["", "checkpointing"])
def test_every_rank_runs_the_same_collectives_in_the_same_order(settings):
    orders = run_ranks("order_of_collectives", 4, archs=SPARSE, chunks=2, updates=2, **settings)
    assert len(orders[0]) > 100 and orders == [orders[0]] * 4


def test_recomputed_blocks_run_the_same_collectives_on_every_rank():
    orders = run_ranks("checkpointed_chunks", 3)
    names = [line.partition(", chunk")[0] for line in orders[0] if line.startswith("begin")]
    assert names == ["begin trip"] * 4 + ["begin trip, backward"] * 2 and orders == [orders[0]] * 3


@pytest.mark.parametrize("how", ["dies", "raises", "stops"])
def test_no_rank_waits_for_one_that_is_gone(how):
    ended = end_ranks("fails_between_chunks", 4, how=how, seconds=1.5)
    assert ended.codes[1] == {"dies": -9, "raises": 1, "stops": 0}[how]
    for rank in (0, 2, 3):
        assert ended.codes[rank] == 1 and ended.seconds[rank] < 20
        message = ended.errors[rank].strip().splitlines()[-1]
        assert "ParallelError: layer 1 (tMoE)" in message and f"rank {rank} " in message and "chunk" in message
        assert "all-to-all of (" in message, message


def test_chunks_are_of_consecutive_experts_and_travel_by_rank():
    assert chunk_sizes(4, 2) == [2, 2] and chunk_sizes(5, 3) == [2, 2, 1] and chunk_sizes(2, 2) == [1, 1]
    assert travelling_order(2, [2, 1]) == [0, 1, 3, 4, 2, 5]
    assert travelling_order(3, [4]) == list(range(12))


def test_the_setting():
    assert ModelConfig().moe.overlap_chunks == 1, "off by default"
    with pytest.raises(UserError, match="overlap_chunks must be at least 1, got 0"):
        preset("smlp_tiny", overlap_chunks=0)
    assert "overlap_chunks" in ignored_settings(preset("dense_lm_tiny", overlap_chunks=2), {})
