"""Losses of tokens against torch's cross-entropy in float64: values and gradients, and what they keep."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from comparing import EXACT, assert_same

from smlp.ops import fast_paths, token_losses
from smlp.ops.fast_paths import reference_ops
from smlp.ops.tolerances import SHARE, largest_share


def drawn(*shape, vocabulary=7, dtype=torch.double):
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(*shape, vocabulary, generator=generator, dtype=torch.double)
    target = torch.randint(vocabulary, shape, generator=generator)
    return logits.to(dtype).requires_grad_(), target


def expected_losses(logits, target, ignored=None):
    losses = -logits.double().log_softmax(-1).gather(-1, target.unsqueeze(-1)).squeeze(-1)
    return losses if ignored is None else losses * (target != ignored)


@pytest.mark.parametrize("at_a_time", [1, 14, 20, 1000])
@pytest.mark.parametrize("ignored", [None, 3])
@pytest.mark.parametrize("shape", [(11,), (2, 5), (1, 1), ()])
def test_losses_and_gradients(shape, ignored, at_a_time, monkeypatch):
    monkeypatch.setattr(fast_paths, "LOGITS_AT_A_TIME", {"cpu": at_a_time})
    logits, target = drawn(*shape)
    losses = token_losses(logits, target, ignored)
    assert "TokenLosses" in str(losses.grad_fn) + str(losses.grad_fn.next_functions) + str(
        [inner.next_functions for inner, _ in losses.grad_fn.next_functions]
    )
    assert_same(losses, expected_losses(logits, target, ignored), [logits], tolerance=EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_probabilities_are_float32_whatever_the_logits_are(dtype):
    logits, target = drawn(40, vocabulary=300, dtype=dtype)
    losses, want = token_losses(logits, target), expected_losses(logits, target)
    assert losses.dtype == torch.float32
    assert largest_share(losses.detach(), want.detach()) <= SHARE[torch.float32]
    (got,) = torch.autograd.grad(losses.sum(), logits)
    (want,) = torch.autograd.grad(want.sum(), logits)
    assert got.dtype == dtype
    assert largest_share(got, want) <= SHARE[dtype]


def test_the_obvious_path_gives_the_same():
    logits, target = drawn(3, 4)
    losses = token_losses(logits, target, ignored=2)
    with reference_ops():
        assert_same(losses, token_losses(logits, target, ignored=2), [logits], tolerance=EXACT)
    with torch.autocast("cpu"):  # a mixture of types is torch's to sort out
        assert "TokenLosses" not in str(token_losses(logits.float(), target).grad_fn.next_functions)


@pytest.mark.parametrize("is_fast", [True, False])
def test_targets_that_do_not_count_may_be_no_ids(is_fast, monkeypatch):
    """Such as torch's own -100."""
    monkeypatch.setattr(fast_paths, "LOGITS_AT_A_TIME", {"cpu": 14})
    logits, target = drawn(3, 4)
    for ignored in (-100, -1, 7):
        target[1, 2] = target[0, 0] = ignored
        want = expected_losses(logits, target.clamp(0, 6)) * (target != ignored)
        with contextlib.nullcontext() if is_fast else reference_ops():
            assert_same(token_losses(logits, target, ignored), want, [logits], tolerance=EXACT)


@pytest.mark.parametrize("is_fast", [True, False])
def test_a_target_that_is_no_id_counts_as_an_error(is_fast):
    logits, target = drawn(3, 4)
    target[1, 2] = -100  # which torch's cross entropy ignores by default
    with contextlib.nullcontext() if is_fast else reference_ops(), pytest.raises((RuntimeError, IndexError)):
        token_losses(logits, target)


def test_only_the_logits_are_kept():
    logits, target = drawn(6, vocabulary=50)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda value: kept.append(value) or value, lambda value: value):
        token_losses(logits, target, ignored=3)
    assert [value.data_ptr() for value in kept if value.is_floating_point()] == [logits.data_ptr()]


def test_views_and_nothing_at_all():
    logits, target = drawn(4, 6)
    part, of_part = logits[:, 1:5], target[:, 1:5]
    assert_same(token_losses(part, of_part), expected_losses(part, of_part), [logits], tolerance=EXACT)
    empty = torch.zeros(0, 5, 7, requires_grad=True)
    losses = token_losses(empty, torch.zeros(0, 5, dtype=torch.long))
    losses.sum().backward()
    assert losses.shape == (0, 5) and empty.grad.shape == empty.shape


def test_a_large_logit_is_no_infinity():
    logits = torch.tensor([[1e4, 0.0, -1e4]], requires_grad=True)
    losses = token_losses(logits, torch.tensor([2]))
    losses.sum().backward()
    assert losses.item() == F.cross_entropy(logits.detach().double(), torch.tensor([2])).item() == 2e4
    assert logits.grad.tolist() == [[1.0, 0.0, -1.0]]
