"""Scores of a stream of tokens, in one pass for each block and position by position."""

import pytest
import torch

import smlp
from smlp.evaluation.leak import randomise
from smlp.evaluation.scoring import block_log_probs, stepwise_log_probs

NARROW = {"vocab_size": 40, "max_tokens": 10, "embed_dim": 16, "ffn_dim": 16, "num_experts": 4}
START = 2


def model(arch):
    return randomise(smlp.build(arch, **NARROW)).eval()


def stream(num_tokens):
    return torch.randint(4, 40, (num_tokens,), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 10, 34, 50])
@pytest.mark.parametrize("batch_size", [1, 2, 16])
def test_every_token_is_scored_once_in_order(num_tokens, batch_size):
    decoder, tokens = model("switch_lm_tiny"), stream(num_tokens)
    got = block_log_probs(decoder, tokens, batch_size)
    assert got.shape == (num_tokens,)
    inputs = [START, *tokens.tolist()[:-1]]
    for i in range(num_tokens):
        begin = i // 10 * 10
        logits = decoder(torch.tensor([inputs[begin : i + 1]])).logits[0, -1]
        torch.testing.assert_close(got[i], logits.log_softmax(0)[tokens[i]], rtol=1e-4, atol=1e-4)


def test_contexts_are_shown():
    seen = []
    block_log_probs(model("smlp_tiny"), stream(34), batch_size=2, seen=seen.append)
    assert [tuple(context.tokens_Bn.shape) for context in seen] == [(2, 10), (2, 10)]


@pytest.mark.parametrize(("arch", "same"), [("smlp_partial_tiny", True), ("smlp_leaky_tiny", False)])
def test_position_by_position_differs_only_where_later_tokens_are_in_sight(arch, same):
    decoder, tokens = model(arch), stream(30)
    first = decoder.config.prefix_tokens
    one_pass = block_log_probs(decoder, tokens).view(3, 10)[:, first:]
    inputs = torch.cat([torch.tensor([START]), tokens[:-1]]).view(3, 10)
    stepwise = stepwise_log_probs(decoder, inputs, tokens.view(3, 10), first)
    assert stepwise.shape == (3, 8)
    assert torch.allclose(one_pass, stepwise, rtol=1e-4, atol=1e-4) == same
    torch.testing.assert_close(one_pass[:, -1], stepwise[:, -1], rtol=1e-4, atol=1e-4)
