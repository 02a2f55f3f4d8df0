"""scripts/ablate_sublayers.py: a part that is left out does nothing, and comes back as it was."""

import pytest
import torch
from running import REPOSITORY

import smlp
from smlp.evaluation.leak import randomise
from smlp.evaluation.scoring import block_log_probs
from smlp.text.tokenizer import Vocabulary


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "scripts"))
    import ablate_sublayers

    return ablate_sublayers


PARTS = {
    "smlp_tiny": {("blocks.0", "gMLP block"), ("blocks.0", "spatial projection")}
    | {("blocks.1", what) for what in ("sMoE", "tMoE", "spatial projection")},
    "dense_lm_tiny": {("blocks.0", "attention"), ("blocks.0", "feed-forward network")},
    "switch_lm_tiny": {(f"blocks.{n}", "attention") for n in (0, 1)}
    | {("blocks.0", "feed-forward network"), ("blocks.1", "tMoE")},
}


def build(arch):
    small = {"vocab_size": 30, "max_tokens": 8, "embed_dim": 16, "ffn_dim": 16, "num_heads": 1, "num_dense_layers": 1}
    sparse = {} if arch == "dense_lm_tiny" else {"num_sparse_layers": 1, "num_experts": 2}
    return randomise(smlp.build(arch, **small, **sparse)).eval()


@pytest.mark.parametrize("arch", PARTS)
def test_every_part_matters_and_comes_back(script, arch):
    model = build(arch)
    tokens = torch.randint(4, 30, (64,), generator=torch.Generator().manual_seed(1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    (_, _, loss), *rows = script.ablate(model, tokens, Vocabulary.eos, lambda line: None)
    assert {(block, what) for block, what, _ in rows} == PARTS[arch]
    assert all(abs(lost) > 1e-6 for _, _, lost in rows)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert script.ablate(model, tokens, Vocabulary.eos, lambda line: None)[0][2] == loss


def test_a_prefix_does_not_count(script):
    model = build("smlp_partial_tiny")
    tokens, prefix = torch.randint(4, 30, (16,), generator=torch.Generator().manual_seed(3)), model.config.prefix_tokens
    (_, _, loss), *_ = script.ablate(model, tokens, Vocabulary.eos, lambda line: None)
    log_probs = block_log_probs(model, tokens).double().view(2, 8)
    assert prefix > 0 and loss == pytest.approx(-float(log_probs[:, prefix:].mean()))
    assert loss != pytest.approx(-float(log_probs.mean()))


def test_a_start_symbol_begins_each_block_as_in_training(script):
    model = build("smlp_tiny")
    tokens = torch.randint(4, 30, (21,), generator=torch.Generator().manual_seed(4))
    (_, _, loss), *_ = script.ablate(model, tokens, Vocabulary.bos, lambda line: None)
    before = torch.tensor([[Vocabulary.bos, last] for last in (Vocabulary.eos, tokens[6], tokens[13])])
    blocks = tokens.view(3, 7)
    logits = model(torch.cat([before, blocks[:, :-1]], dim=1)).logits[:, 1:]
    log_probs = logits.log_softmax(2).gather(2, blocks[:, :, None])
    assert loss == pytest.approx(-float(log_probs.detach().mean()), abs=1e-6)


def test_blocks_of_unknown_parts_are_named(script):
    sizes = {"vocab_size": 30, "max_tokens": 8, "embed_dim": 16, "ffn_dim": 16, "num_heads": 1, "num_dense_layers": 2}
    said = []
    script.ablate(smlp.build("gmlp_lm_tiny", **sizes, dense_block="masked").eval(), torch.arange(4, 12), 2, said.append)
    assert said[1:] == ["not ablated, because their parts are unknown here: blocks.0, blocks.1"]


def test_without_a_part_the_rest_is_what_a_model_without_it_computes(script):
    model = build("smlp_tiny")
    tokens = torch.randint(4, 30, (2, 8), generator=torch.Generator().manual_seed(2))
    sparse = model.blocks[1]
    with script.without(sparse.token_moe), script.without(sparse.mixing.feature_moe):
        skipped = model(tokens).logits
    model.blocks = torch.nn.ModuleList([model.blocks[0]])
    assert torch.allclose(skipped, model(tokens).logits, atol=1e-6)
