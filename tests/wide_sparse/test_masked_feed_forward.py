"""Language models with masked feed-forward networks: same connections, more width; through checkpoints and exports."""

import pytest
import torch
from tiny_checkpoints import write_checkpoint
from transformers import AutoModelForCausalLM

import smlp
import smlp.hf
from smlp.checkpoint.load import load_pretrained
from smlp.cli.flops import account
from smlp.cli.main import main
from smlp.config.presets import preset
from smlp.errors import UserError
from smlp.nn.layers import MaskedLinear
from smlp.wide_sparse.counts import text_rows

WORDS = [f"word{number}" for number in range(12)]
SMALL = {"vocab_size": 16, "max_tokens": 8, "embed_dim": 16, "ffn_dim": 128, "num_dense_layers": 2, "num_heads": 2}


def masked(model):
    return [layer for layer in model.modules() if isinstance(layer, MaskedLinear)]


def test_width_times_four_at_a_quarter_of_the_density():
    """The same connections; four times the executed work."""
    narrow = {row.kind: row for row in text_rows("", preset("dense_lm_tiny", ffn_dim=256))}["feed-forward"]
    config = preset("dense_lm_tiny", ffn_dim=1024, transformer_ffn_density=0.25)
    wide = {row.kind: row for row in text_rows("", config)}["feed-forward"]
    assert wide.connections == narrow.connections == narrow.executed and wide.executed == 4 * narrow.executed
    assert wide.density == narrow.density / 4 and wide.uses == narrow.uses == 128
    assert account(config, 1, None, None)["agrees"]


def test_masked_weights_of_a_language_model_stay_zero():
    torch.manual_seed(0)
    model = smlp.build("dense_lm_tiny", **SMALL, transformer_ffn_density=0.3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.3)
    masks = [layer.mask.clone() for layer in masked(model)]
    assert len(masks) == 4
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randint(4, 16, (2, 8))).logits.square().mean().backward()
        optimizer.step()
    for layer, mask in zip(masked(model), masks, strict=True):
        assert torch.equal(layer.mask, mask)
        assert (layer.weight[~mask] == 0).all() and (layer.weight.grad[~mask] == 0).all()
        assert (layer.weight.grad[mask] != 0).any()


@pytest.mark.parametrize(
    ("settings", "count"),
    [({"transformer_ffn_density": 0.3}, 2), ({"dense_block": "masked", "masked_density": 0.3, "max_tokens": 8}, 1)],
)
def test_masks_go_through_checkpoints_and_exports(tmp_path, settings, count):
    path, model = write_checkpoint(tmp_path, WORDS, "dense_lm_tiny", **settings)
    assert main(["export", "--hf", str(path), str(tmp_path / "export")]) == 0
    assert main(["checkpoint", "merge", str(path), "-o", str(tmp_path / "model.safetensors")]) == 0
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    loaded, tokens = load_pretrained(path).core, torch.randint(4, 16, (2, 8))
    for other in (loaded, theirs, load_pretrained(tmp_path / "model.safetensors").core):
        assert len(masked(other)) == len(masked(model)) == count
        for one, two in zip(masked(model), masked(other), strict=True):
            assert torch.equal(one.mask, two.mask) and torch.equal(one.weight, two.weight)
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)


def test_densities_that_cannot_be_used():
    with pytest.raises(UserError, match="transformer_ffn_density must be above 0 and at most 1"):
        preset("dense_lm_tiny", transformer_ffn_density=0.0)
    with pytest.raises(UserError, match="masks dense blocks with self-attention, and this model has none"):
        preset("base_lm_tiny", num_dense_layers=0, transformer_ffn_density=0.5)
