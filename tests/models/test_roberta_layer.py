"""An encoder's post-LN block against fairseq's TransformerEncoderLayer, the layer of its RoBERTa."""

import argparse

import torch
from sparse_references import randomised

import smlp
from smlp.nn.blocks import AttentionSublayer, DenseBlock
from smlp.nn.state import ForwardContext

WIDTH, HEADS, FFN = 12, 3, 20


def test_a_block_is_fairseqs_encoder_layer():
    from fairseq.modules import TransformerEncoderLayer

    config = smlp.preset(
        "bert_mlm", vocab_size=30, max_tokens=9, embed_dim=WIDTH, ffn_dim=FFN, num_dense_layers=1, num_heads=HEADS,
        dropout=0.0, attention_dropout=0.0, layer_norm="after",
        activation="relu",  # fairseq computes its GELU in float32
    )  # fmt: skip
    block = randomised(DenseBlock(config, AttentionSublayer(config)))
    theirs = TransformerEncoderLayer(
        argparse.Namespace(
            encoder_embed_dim=WIDTH, encoder_ffn_embed_dim=FFN, encoder_attention_heads=HEADS, dropout=0.0,
            attention_dropout=0.0, activation_fn="relu", encoder_normalize_before=False,
        )
    ).double()  # fmt: skip
    # One product of ours makes queries, keys and values; fairseq has a layer for each.
    attention, state = block.mixing.attention, {}
    for name, weight, bias in zip(
        "qkv", attention.proj_in.weight.chunk(3), attention.proj_in.bias.chunk(3), strict=True
    ):
        state |= {f"self_attn.{name}_proj.weight": weight, f"self_attn.{name}_proj.bias": bias}
    pairs = {
        "self_attn.out_proj": attention.proj_out, "self_attn_layer_norm": block.mixing.norm,
        "final_layer_norm": block.norm, "fc1": block.feed_forward.fc1, "fc2": block.feed_forward.fc2,
    }  # fmt: skip
    for name, module in pairs.items():
        state |= {f"{name}.weight": module.weight, f"{name}.bias": module.bias}
    theirs.load_state_dict({name: weight.detach() for name, weight in state.items()})

    x = torch.randn(3, 7, WIDTH, dtype=torch.double, requires_grad=True)
    valid_Bn = torch.ones(3, 7, dtype=torch.bool)
    valid_Bn[1, 5:] = False
    got, _ = block(x, ForwardContext(valid_Bn=valid_Bn))
    want = theirs(x.transpose(0, 1), encoder_padding_mask=~valid_Bn).transpose(0, 1)
    torch.testing.assert_close(got[valid_Bn], want[valid_Bn], rtol=1e-11, atol=1e-11)
    (ours,) = torch.autograd.grad(got[valid_Bn].square().sum(), x)
    (other,) = torch.autograd.grad(want[valid_Bn].square().sum(), x)
    torch.testing.assert_close(ours, other, rtol=1e-9, atol=1e-9)
