"""Balanced assignment: always a partition, nearly optimal, bounded, deterministic."""

import time

import numpy as np
import pytest
import torch
from comparing import EXACT, assert_balanced
from scipy.optimize import linear_sum_assignment

from smlp.ops import balanced_assignment, balanced_assignments
from smlp.ops.assignment import equal_load_prices, finest_prices
from smlp.ops.assignment_repair import PathRepair
from smlp.ops.fast_paths import reference_ops


def optimum(scores: torch.Tensor) -> float:
    """Best total under loads of floor(N/E) or ceil(N/E): one column a place, dummies in the places left empty."""
    matrix = scores.double().numpy()
    num_tokens, num_experts = matrix.shape
    floor, remainder = divmod(num_tokens, num_experts)
    columns = np.repeat(np.arange(num_experts), floor)
    if remainder:
        columns = np.concatenate([columns, np.arange(num_experts)])
    places = matrix[:, columns]
    if remainder:
        dummies = np.zeros((num_experts - remainder, len(columns)))
        dummies[:, : num_experts * floor] = -1e9  # they may only take optional places
        places = np.concatenate([places, dummies])
    rows, chosen = linear_sum_assignment(places, maximize=True)
    return sum(places[r, c] for r, c in zip(rows, chosen, strict=True) if r < num_tokens)


def make_scores(kind: str, num_tokens: int, num_experts: int, generator: torch.Generator) -> torch.Tensor:
    def randn(*shape):
        return torch.randn(*shape, generator=generator)

    if kind == "normal":
        return randn(num_tokens, num_experts)
    if kind == "uniform":
        return torch.rand(num_tokens, num_experts, generator=generator)
    if kind == "popular experts":
        return randn(num_tokens, 1) + randn(1, num_experts) + 0.1 * randn(num_tokens, num_experts)
    if kind == "repeated tokens":
        return randn(8, num_experts)[torch.randint(8, (num_tokens,), generator=generator)]
    return randn(num_tokens, 16) @ randn(16, num_experts)  # token . centroid


KINDS = ("normal", "uniform", "popular experts", "repeated tokens", "products")


def test_within_one_percent_of_the_optimum_in_200_cases():
    rng = np.random.default_rng(0)
    for case in range(200):
        num_tokens, num_experts = int(rng.integers(1, 300)), int(rng.integers(1, 33))
        scores = make_scores(KINDS[case % 5], num_tokens, num_experts, torch.Generator().manual_seed(case))
        owner = balanced_assignment(scores)
        assert_balanced(owner, num_tokens, num_experts)
        best = optimum(scores)
        got = scores.gather(1, owner.unsqueeze(1)).double().sum().item()
        assert best - got <= 0.01 * abs(best), (case, num_tokens, num_experts, best, got)


@pytest.mark.parametrize("num_experts", [1, 2, 7, 8, 32])
@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_tokens_is_partitioned(num_experts, kind):
    for num_tokens in (0, 1, num_experts - 1, num_experts, num_experts + 1, 3 * num_experts + 1, 66, 1023):
        scores = make_scores(kind, num_tokens, num_experts, torch.Generator().manual_seed(num_tokens))
        assert_balanced(balanced_assignment(scores), num_tokens, num_experts)


def test_as_many_experts_as_tokens_are_no_matter_of_seconds():
    scores = make_scores("normal", 768, 768, torch.Generator().manual_seed(1))
    begin = time.process_time()
    owner = balanced_assignment(scores)
    assert time.process_time() - begin < 1  # 0.05 s, and 2 s by Bellman-Ford
    assert scores.gather(1, owner.unsqueeze(1)).sum().item() == pytest.approx(optimum(scores), rel=1e-5)


@pytest.mark.parametrize(("num_tokens", "num_experts"), [(64, 4), (1024, 8), (66, 4), (3, 4), (64, 1)])
def test_ties_lose_no_token(num_tokens, num_experts):
    """The cases on which fairseq's solver loses tokens or never returns."""
    constant = torch.full((num_tokens, num_experts), 0.5)
    same_row = torch.randn(1, num_experts, generator=torch.Generator().manual_seed(0)).expand(num_tokens, -1)
    two_values = (torch.arange(num_tokens).unsqueeze(1) % 2).float().expand(-1, num_experts)
    for scores in (constant, same_row, two_values, constant * 0, constant * float("inf")):
        assert_balanced(balanced_assignment(scores), num_tokens, num_experts)


def test_hand_worked_case():
    # Both tokens like expert 0; giving it to the second loses 4, to the first loses 1.
    assert balanced_assignment(torch.tensor([[5.0, 4.0], [5.0, 1.0]])).tolist() == [1, 0]


def test_an_infinite_score_wins_its_place():
    scores = torch.zeros(4, 2)
    scores[2, 1], scores[3, 1] = float("inf"), float("-inf")
    scores[0, 0] = 1.0
    owner = balanced_assignment(scores)
    assert owner[2] == 1 and owner[3] == 0
    assert_balanced(owner, 4, 2)
    for shift in (-10.0, 0.0, 10.0):  # what is infinite is beyond all others, wherever these are
        scores = torch.tensor([[0.0, 1.0], [0.0, 3.0], [float("inf"), 0.0], [0.0, float("-inf")]]) + shift
        assert balanced_assignment(scores).tolist() == [1, 1, 0, 0]
        assert balanced_assignment(scores.flip(0)).tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("value", [1e38, 3e38])
def test_huge_scores_do_not_overflow(value):
    scores = torch.tensor([[value, -value], [value / 2, -value], [0.0, 0.0], [-value, value]])
    owner = balanced_assignment(scores)
    assert_balanced(owner, 4, 2)
    assert owner[0] == 0 and owner[3] == 1
    masked = torch.rand(20000, 4, generator=torch.Generator().manual_seed(0)) / 2
    masked[:5400, 1:] = torch.finfo(torch.float32).min
    owner = balanced_assignment(masked)
    assert_balanced(owner, 20000, 4)
    assert (owner[:5400] == 0).sum() == 5000


def test_nan_is_an_error_with_numbers():
    scores = torch.zeros(6, 2)
    scores[1, 0] = float("nan")
    with pytest.raises(FloatingPointError, match="1 of 6 tokens"):
        balanced_assignment(scores)
    with pytest.raises(FloatingPointError, match="6 of 6"):
        balanced_assignment(torch.full((6, 1), float("nan")))


def test_a_wrong_shape_is_named():
    with pytest.raises(ValueError, match=r"\(5,\)"):
        balanced_assignment(torch.zeros(5))
    with pytest.raises(ValueError, match=r"scores must have shape \(B, N, E\) with E >= 1, got \(5, 4\)"):
        balanced_assignments(torch.zeros(5, 4))
    with pytest.raises(ValueError, match=r"\(5, 0\)"):
        balanced_assignment(torch.zeros(5, 0))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_an_offset_hides_nothing_of_integers(dtype):
    scores = torch.randint(0, 100, (64, 8), generator=torch.Generator().manual_seed(1), dtype=dtype)
    assert torch.equal(balanced_assignment(scores + 10**9), balanced_assignment(scores))
    assert torch.equal(balanced_assignment(scores), balanced_assignment(scores.double()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_same_scores_same_result(dtype):
    scores = torch.randn(500, 8, generator=torch.Generator().manual_seed(3)).to(dtype)
    first = balanced_assignment(scores)
    assert_balanced(first, 500, 8)
    torch.manual_seed(123)  # the global generator has no say and is not used up
    before = torch.random.get_rng_state()
    assert torch.equal(balanced_assignment(scores), first)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_scale_and_offset_do_not_matter():
    scores = torch.randn(256, 8, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    assert torch.equal(balanced_assignment(scores * 1e-20 + 1e-18), balanced_assignment(scores * 64 + 64 * 100))


@pytest.mark.parametrize("kind", KINDS)
def test_bounded_time_on_a_training_batch(kind):
    scores = make_scores(kind, 4096, 32, torch.Generator().manual_seed(0))
    start = time.perf_counter()
    owner = balanced_assignment(scores)
    assert time.perf_counter() - start < 10.0
    assert_balanced(owner, 4096, 32)


def with_equals(kind: str, num_tokens: int, num_experts: int) -> torch.Tensor:
    """Scores of which many are equal, or that many tokens share in nearly the same way."""
    generator = torch.Generator().manual_seed(6)
    normal = torch.randn(num_tokens, num_experts, generator=generator)
    if kind == "constant":
        return torch.zeros_like(normal)
    if kind == "nearly constant":
        return 1 + 1e-7 * normal
    if kind == "two values":
        return (normal > 0.5).float()
    if kind == "rare values":
        return (normal > 2).float()
    if kind == "equal rows":
        return normal[:1].expand(num_tokens, -1)
    if kind == "eight rows":
        return normal[torch.randint(8, (num_tokens,), generator=generator)]
    if kind == "rank one":
        return normal[:, :1] @ normal[:1]
    if kind == "tied blocks":
        return normal.sign().mul(normal[:4].repeat_interleave(num_tokens // 4 + 1, dim=0)[:num_tokens].round())
    return torch.cat([normal[: num_tokens // 2], torch.zeros_like(normal[num_tokens // 2 :])])


EQUALS = (
    *("constant", "nearly constant", "two values", "rare values", "equal rows", "eight rows", "rank one"),
    *("tied blocks", "half constant"),
)


@pytest.mark.parametrize("kind", EQUALS)
@pytest.mark.parametrize(("num_tokens", "num_experts"), [(4096, 32), (2000, 16)])
def test_equal_scores_cost_little_more_than_others(kind, num_tokens, num_experts, monkeypatch):
    """Work, not time: prices leave at most two tokens for each expert to be moved by the slow exact way."""
    paths = []
    best_path = PathRepair._best_path
    monkeypatch.setattr(PathRepair, "_best_path", lambda *one: paths.append(best_path(*one)) or paths[-1])
    monkeypatch.setattr(PathRepair, "_shed", lambda self, count: pytest.fail("the repair was cut short"))
    owner = balanced_assignment(with_equals(kind, num_tokens, num_experts))
    assert_balanced(owner, num_tokens, num_experts)
    assert len(paths) <= 2 * num_experts


@pytest.mark.parametrize("kind", EQUALS)
@pytest.mark.parametrize(("num_tokens", "num_experts"), [(600, 32), (601, 32), (130, 8), (37, 8)])
def test_equal_scores_are_assigned_for_the_best_total(kind, num_tokens, num_experts):
    scores = with_equals(kind, num_tokens, num_experts)
    got = scores.double().gather(1, balanced_assignment(scores).unsqueeze(1)).sum().item()
    spread = (scores.amax(dim=1) - scores.amin(dim=1)).median().item() or 1.0
    assert optimum(scores) - got <= 1e-3 * spread * num_tokens


def without_prices(monkeypatch):
    monkeypatch.setattr(
        "smlp.ops.assignment.equal_load_prices", lambda values, sample=None: torch.zeros_like(values[:, :1])
    )


@pytest.fixture
def large(monkeypatch):
    """Small problems take the way of large ones."""
    monkeypatch.setattr("smlp.ops.fast_paths.EXACT_SCORES", 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_tokens", "num_experts"), [(2100, 8), (1111, 16)])
def test_large_problems_within_one_percent_of_the_optimum(kind, num_tokens, num_experts):
    scores = make_scores(kind, num_tokens, num_experts, torch.Generator().manual_seed(5))
    owner = balanced_assignment(scores)
    assert_balanced(owner, num_tokens, num_experts)
    got, best = scores.gather(1, owner.unsqueeze(1)).double().sum().item(), optimum(scores)
    assert best - got <= 0.01 * abs(best), (best, got)


@pytest.mark.parametrize("priced", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_large_problems_are_partitioned(kind, priced, large, monkeypatch):
    if not priced:
        without_prices(monkeypatch)
    for num_tokens, num_experts in [(8, 2), (33, 8), (66, 4), (1023, 32), (4096, 8)]:
        scores = make_scores(kind, num_tokens, num_experts, torch.Generator().manual_seed(num_tokens))
        assert_balanced(balanced_assignment(scores), num_tokens, num_experts)
        assert_balanced(balanced_assignment(scores * 0), num_tokens, num_experts)
        assert_balanced(balanced_assignment(scores[:1].expand(num_tokens, -1)), num_tokens, num_experts)
        assert_balanced(balanced_assignment(scores / 0), num_tokens, num_experts)


def test_the_fallback_beyond_the_repair_limit_is_a_partition_too(monkeypatch):
    monkeypatch.setattr("smlp.ops.assignment_repair.REPAIRS_PER_EXPERT", 0)
    without_prices(monkeypatch)
    for num_tokens in (5, 64, 65, 1023):
        for kind in KINDS:
            scores = make_scores(kind, num_tokens, 8, torch.Generator().manual_seed(1))
            assert_balanced(balanced_assignment(scores), num_tokens, 8)


@pytest.mark.parametrize("offset", [30.0, 1000.0])
def test_what_all_experts_share_does_not_matter(offset):
    """A constant for each token changes no comparison between experts, however large it is."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(256, 8, generator=generator)
    shifted = scores + offset * torch.randn(256, 1, generator=generator)
    owner = balanced_assignment(shifted)
    assert_balanced(owner, 256, 8)
    got, best = scores.gather(1, owner.unsqueeze(1)).double().sum().item(), optimum(scores)
    assert best - got <= 0.01 * abs(best), (got, best)


def test_one_outlier_does_not_spoil_the_others():
    scores = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    spoilt = scores.clone()
    spoilt[17, 3] = 1e4
    owner = balanced_assignment(spoilt)
    assert owner[17] == 3
    rest = torch.arange(256) != 17
    got = scores[rest].gather(1, owner[rest].unsqueeze(1)).double().sum().item()
    assert got >= 0.99 * (optimum(scores) - 4)


def test_problems_of_a_batch_are_solved_each_by_itself():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(5, 24, 4, generator=generator) * torch.tensor([1.0, 100.0, 1e-6, 0.0, 3.0]).view(5, 1, 1)
    together = balanced_assignments(scores)
    assert torch.equal(together, torch.stack([balanced_assignment(one) for one in scores]))
    assert balanced_assignments(torch.zeros(0, 24, 4)).shape == (0, 24)
    assert balanced_assignments(torch.zeros(3, 0, 4)).shape == (3, 0)
    scores[2, 7, 1] = float("nan")
    with pytest.raises(FloatingPointError, match="1 of 120 tokens"):
        balanced_assignments(scores)


def test_large_problems_of_a_batch_are_solved_each_by_itself(large):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(5, 96, 4, generator=generator) * torch.tensor([1.0, 100.0, 1e-6, 0.0, 3.0]).view(5, 1, 1)
    together = balanced_assignments(scores)
    assert torch.equal(together, torch.stack([balanced_assignment(one) for one in scores]))


def test_mates_of_other_kinds_change_nothing():
    """Of several large problems at once, as a batch of sequences has them (sMLP-partial), each is solved by itself."""
    problems = [make_scores(kind, 600, 32, torch.Generator().manual_seed(1)) for kind in KINDS]
    alike = balanced_assignments(problems[0].expand(len(problems), -1, -1))[0]
    assert torch.equal(balanced_assignments(torch.stack(problems))[0], alike)
    cubed = [problem**3 for problem in problems[1:]]
    assert torch.equal(balanced_assignments(torch.stack([problems[0], *cubed]))[0], alike)


def test_the_reference_is_the_optimum():
    scores = make_scores("normal", 800, 32, torch.Generator().manual_seed(2))
    with reference_ops():
        owner = balanced_assignment(scores)
    assert scores.gather(1, owner.unsqueeze(1)).double().sum().item() == pytest.approx(optimum(scores), rel=1e-4)
    assert not torch.equal(owner, balanced_assignment(scores))


@pytest.mark.parametrize("num_tokens", [2048, 2100, 1111])
def test_prices_by_bands_of_tokens(num_tokens, monkeypatch):
    values = torch.rand(1, num_tokens, 5, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    whole = equal_load_prices(values), finest_prices(values)
    monkeypatch.setattr("smlp.ops.fast_paths.BANDED_SCORES", 0)
    for found, expected in zip((equal_load_prices(values), finest_prices(values)), whole, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=EXACT)


@pytest.mark.parametrize("scores", [[[1.0, 2.0]], None, torch.zeros(2, 2, dtype=torch.complex64)])
def test_what_is_no_tensor_of_real_numbers_is_refused(scores):
    with pytest.raises(ValueError, match="scores must be a tensor of real numbers, got"):
        balanced_assignment(scores)


def test_a_tensor_without_values_is_refused():
    with pytest.raises(ValueError, match="scores must be a tensor with values, got one on the device meta"):
        balanced_assignment(torch.empty(4, 2, device="meta"))


@pytest.mark.parametrize("num_tokens", [64, 4096])
def test_products_of_autocast_do_not_reach_it(num_tokens):
    scores = torch.randn(num_tokens, 8, generator=torch.Generator().manual_seed(0))
    want = balanced_assignment(scores)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(balanced_assignment(scores), want)
