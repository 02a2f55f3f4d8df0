"""Tokens mixed over ranks before balanced assignment (--base-shuffle)."""

import pytest
from rank_running import run_ranks

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("num_tokens", [[7, 12, 4, 9], [0, 5, 1, 8], [3, 3, 3, 3], [0, 0, 0, 0]])
def test_every_rank_gets_its_share_and_gives_it_back(num_tokens):
    for came in zip(*run_ranks("there_and_back", 4, num_tokens=num_tokens), strict=True):
        for rank, of_rank in enumerate(came):
            for source, count in enumerate(of_rank):
                assert num_tokens[source] // 4 <= count <= -(-num_tokens[source] // 4), (rank, source)
        if len(set(num_tokens)) == 1:
            assert [sum(of_rank) for of_rank in came] == num_tokens
        assert [sum(column) for column in zip(*came, strict=True)] == num_tokens


@pytest.mark.parametrize("group_size", [1, 2])
def test_training_with_mixed_tokens(group_size):
    for plain, mixed, again in run_ranks("trains_with_mixed_tokens", 2, group_size=group_size):
        assert mixed == again  # the same draws, in the recomputation of a block too
        assert (mixed == pytest.approx(plain, rel=1e-9)) == (group_size == 1)
