"""Masked layers over whole sequences of a language model, and the CKA of language models."""

import json

import pytest
import torch
from fairseq.data import indexed_dataset
from tiny_checkpoints import write_checkpoint
from torch.nn.functional import gelu, layer_norm

import smlp
from smlp.cli.flops import account
from smlp.cli.main import main
from smlp.config.presets import preset
from smlp.errors import UserError
from smlp.evaluation.leak import leak_test, randomise
from smlp.nn.state import DecodingState, ForwardContext
from smlp.wide_sparse.cka import recorded
from smlp.wide_sparse.counts import text_rows
from smlp.wide_sparse.text_features import branches

SIZES = {"vocab_size": 30, "max_tokens": 6, "embed_dim": 8, "num_dense_layers": 2, "dropout": 0.0}
MASKED = {**SIZES, "dense_block": "masked", "masked_density": 0.4}
WORDS = [f"word{number}" for number in range(12)]


def masked_model(**settings):
    torch.manual_seed(3)
    return smlp.build("gmlp_lm_tiny", **{**MASKED, **settings}).double()


def test_output_and_gradients_are_those_of_the_explicit_matrix():
    model = masked_model()
    block, size = model.blocks[0], 6 * 8
    x = torch.randn(3, 6, 8, dtype=torch.float64, requires_grad=True)
    out, _ = block(x, ForwardContext(torch.zeros(3, 6, dtype=torch.long)))
    grads = torch.autograd.grad(out.square().sum(), [x, block.layer.weight, block.norm.weight])
    expected = x.clone()
    normed = layer_norm(x, (8,), block.norm.weight, block.norm.bias)
    weight = block.layer.weight
    rows = []
    for t in range(6):
        for feature in range(8):
            row = t * 8 + feature
            total = torch.zeros(3, dtype=torch.float64)
            for source in range((t + 1) * 8):  # no later position
                if block.layer.mask[row, source]:
                    total = total + weight[row, source] * normed[:, source // 8, source % 8]
            rows.append(gelu(total))
    expected = expected + torch.stack(rows, 1).view(3, 6, 8)
    references = torch.autograd.grad(expected.square().sum(), [x, weight, block.norm.weight])
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    for grad, reference in zip(grads, references, strict=True):
        torch.testing.assert_close(grad, reference, rtol=1e-11, atol=1e-11)
    is_later = torch.arange(size).view(1, -1) // 8 > torch.arange(size).view(-1, 1) // 8
    assert not block.layer.mask[is_later].any() and (weight[~block.layer.mask] == 0).all()
    assert 0.3 < block.layer.mask[~is_later].double().mean() < 0.5
    assert block.layer.density == pytest.approx(0.4 * 7 / 12)


def test_masked_weights_stay_zero_under_weight_decay():
    model = masked_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.3)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randint(4, 30, (2, 6))).logits.square().mean().backward()
        optimizer.step()
    for block in model.blocks:
        assert (block.layer.weight[~block.layer.mask] == 0).all()
        assert (block.layer.weight.grad[block.layer.mask] != 0).any()


def test_shorter_inputs_and_steps_give_the_same_logits():
    model = randomise(masked_model().float()).double().eval()
    tokens = torch.randint(4, 30, (2, 6))
    whole = model(tokens).logits
    torch.testing.assert_close(model(tokens[:, :4]).logits, whole[:, :4])
    state = DecodingState()
    steps = [model(part, state).logits for part in (tokens[:, :3], tokens[:, 3:4], tokens[:, 4:])]
    torch.testing.assert_close(torch.cat(steps, 1), whole)


def test_no_later_token_has_influence_until_the_mask_lets_it():
    model = randomise(masked_model().float())
    assert not any(report.leaks for report in leak_test(model))
    model.blocks[0].layer.mask[:8, 8:16] = True
    assert any(report.leaks for report in leak_test(model))


def test_costs_and_the_wide_sparse_view():
    config = preset("gmlp_lm_tiny", **MASKED)
    assert account(config, 1, None, None)["agrees"]
    row = next(row for row in text_rows("", config) if row.kind == "masked layer")
    assert row.width == 48 and row.executed == 48**2 and row.uses == 1
    assert row.connections == pytest.approx(0.4 * 8 * 8 * 21, abs=1)


def test_settings_that_cannot_be_used():
    with pytest.raises(UserError, match="masked_density must be above 0 and at most 1, got 0"):
        preset("gmlp_lm_tiny", **{**MASKED, "masked_density": 0})
    with pytest.raises(UserError, match="masked blocks are causal"):
        preset("bert_mlm_tiny", dense_block="masked", layer_norm="before")


@pytest.mark.parametrize(
    ("arch", "settings", "names"),
    [
        ("smlp_hash_tiny", {}, ["0", "1.mixing", "1.experts"]),
        ("smlp_hash_tiny", {"smlp_order": "tokens_first"}, ["0", "1.experts", "1.mixing"]),
        ("switch_lm_tiny", {"num_heads": 2}, ["0.mixing", "0.feed-forward", "1.mixing", "1.experts"]),
        ("gmlp_lm_tiny", {"dense_block": "masked"}, ["0", "1"]),
    ],
)
def test_branches_add_up_to_what_the_blocks_add(arch, settings, names):
    sizes = {**SIZES, "ffn_dim": 16, "num_dense_layers": 1, "num_sparse_layers": 1, "num_experts": 2}
    if arch == "gmlp_lm_tiny":
        sizes |= {"num_dense_layers": 2, "num_sparse_layers": 0}
    model = randomise(smlp.build(arch, **sizes, **settings)).eval()
    ends = []
    model.blocks[0].register_forward_pre_hook(lambda module, inputs: ends.append(inputs[0]))
    model.blocks[-1].register_forward_hook(lambda module, inputs, output: ends.append(output[0]))
    with torch.no_grad(), recorded(branches(model)) as features:
        model(torch.randint(4, 30, (4, 6)))
    assert list(branches(model)) == names and len(features) == len(names)
    torch.testing.assert_close(sum(features), ends[1] - ends[0], rtol=1e-4, atol=1e-4)


def test_cka_of_language_models(tmp_path, capsys):
    one, _ = write_checkpoint(tmp_path / "one", WORDS, "smlp_hash_tiny", max_tokens=6)
    settings = {"dense_block": "masked", "num_sparse_layers": 0, "num_dense_layers": 3}
    two, _ = write_checkpoint(tmp_path / "two", WORDS, "gmlp_lm_tiny", max_tokens=6, **settings)
    one, two, data = str(one), str(two), tmp_path / "data"
    data.mkdir()
    (data / "dict.txt").write_bytes((tmp_path / "one" / "dict.txt").read_bytes())
    builder = indexed_dataset.make_builder(str(data / "valid.bin"), "mmap", vocab_size=16)
    for seed in range(10):
        builder.add_item(torch.randint(4, 16, (5,), generator=torch.Generator().manual_seed(seed)))
    builder.finalize(str(data / "valid.idx"))
    file = tmp_path / "cka.json"
    options = ["--data-dir", str(data), "-b", "4"]
    assert main(["wide-sparse", "cka", one, two, *options, "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found["first"] == ["0", "1.mixing", "1.experts"] and found["second"] == ["0", "1", "2"]
    assert found["sequences"] == 8 and all(value < 0.999 for row in found["cka"] for value in row)
    assert main(["wide-sparse", "cka", two, two, *options, "--batches", "1", "--json", str(file)]) == 0
    same = json.loads(file.read_text())
    assert same["sequences"] == 4 and all(same["cka"][i][i] == pytest.approx(1) for i in range(3))
    capsys.readouterr()
    assert main(["wide-sparse", "cka", one, two, *options[:-1], "9"]) == 1
    assert "the text has 8 sequences of 6 tokens, less than --batch-size 9" in capsys.readouterr().err
    longer, _ = write_checkpoint(tmp_path / "longer", WORDS, "gmlp_lm_tiny", max_tokens=7)
    assert main(["wide-sparse", "cka", one, str(longer), *options]) == 1
    assert "must read as many tokens, got contexts of 6 and 7" in capsys.readouterr().err
