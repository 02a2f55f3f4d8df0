"""Memory of an update by formula, compared with what autograd keeps (:mod:`smlp.costs.memory`)."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from smlp.config.presets import preset
from smlp.costs.memory import activations_per_position, update_memory
from smlp.nn.decoder import Decoder

ARCHS = (
    "gmlp_lm", "dense_lm", "smlp", "smlp_partial", "gmlp_moe", "switch_lm", "gshard_lm", "base_lm", "hash_lm",
)  # fmt: skip


def config_of(arch, **more):
    sparse = {"num_experts": 4} if arch not in ("gmlp_lm", "dense_lm") else {}
    attention = {"num_heads": 4} if "mlp" not in arch else {}
    layers = {"num_dense_layers": 1, "num_sparse_layers": len(sparse)}
    sizes = {"embed_dim": 64, "ffn_dim": 256, "max_tokens": 512, "vocab_size": 300}
    config = preset(arch, **sizes, **layers, **sparse, **attention, **more)
    # nothing dropped, so that every token has its k experts
    return replace(config, capacity_factor=0.0, second_expert="all")


def bytes_kept(config, num_seqs):
    """Bytes of all storages that autograd keeps in a forward pass, those of the model apart."""
    torch.manual_seed(0)
    model = Decoder(config).train()
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    ids = torch.randint(4, config.vocab_size, (num_seqs, config.max_tokens))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(ids)
        F.cross_entropy(output.logits.flatten(0, 1), ids.flatten()) + sum(output.aux_losses.values())
    return sum(tensor.untyped_storage().nbytes() for pointer, tensor in kept.items() if pointer not in own)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_activations_are_what_autograd_keeps(arch, dropout):
    config = config_of(arch, dropout=dropout)
    counted = bytes_kept(config, 2) / 4 / (2 * config.max_tokens)
    assert activations_per_position(config) == pytest.approx(counted, rel=0.02)


@pytest.mark.parametrize("arch", ["dense_lm", "hash_lm"])
@pytest.mark.parametrize("attention", ["rotary", "relative", "relative_only"])
def test_positions_in_attention(arch, attention):
    config = config_of(arch, transformer_attention=attention, dropout=0.1)
    counted = bytes_kept(config, 8) / 4 / (8 * config.max_tokens)
    assert activations_per_position(config) == pytest.approx(counted, rel=0.1)


@pytest.mark.parametrize("arch", ["smlp", "smlp_partial"])
def test_linear_experts_keep_no_gates(arch):
    config, gated = config_of(arch, feature_experts="linear"), config_of(arch)
    counted = bytes_kept(config, 2) / 4 / (2 * config.max_tokens)
    assert activations_per_position(config) == pytest.approx(counted, rel=0.005)
    assert activations_per_position(config) < activations_per_position(gated)


def test_all_of_an_update():
    config = config_of("smlp")
    memory = update_memory(config, 1024)
    numbers = sum(parameter.numel() for parameter in Decoder(config).parameters())
    assert memory.weights == memory.gradients == 4 * numbers and memory.moments == 8 * numbers
    assert memory.total == 16 * numbers + memory.activations
    spread = update_memory(config, 1024, world_size=4, bytes_each=2)
    assert spread.activations == memory.activations / 2
    assert spread.weights < memory.weights / 2 and spread.moments == 4 * spread.weights
