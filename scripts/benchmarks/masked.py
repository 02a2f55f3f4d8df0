"""Time updates (forward, backward, Adam) of masked language models: ours at equal FLOPs, and fairseq's RoBERTa."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from benchmarks import peers
from benchmarks.report import Row, compared
from benchmarks.settings import Settings
from benchmarks.timing import interleaved
from smlp.config import ModelConfig
from smlp.config.presets import preset
from smlp.costs.formula import flops_per_token, num_masked
from smlp.nn.encoder import Encoder
from smlp.ops import token_losses

SECTION = "Updates of masked language models at equal FLOPs"
#: of the paper's base models, a quarter of the depth
LAYERS, TOKENS = 3, 2048
#: gMLP to BERT in tokens a second, by context
TARGETS = {128: 1.1, 512: None}


def rows(settings: Settings) -> Iterator[Row]:
    """Compare gMLP and aMLP of base width with BERT, and post-LN BERT with fairseq's RoBERTa."""
    for length, target in TARGETS.items():
        bert = _small(preset("bert_mlm_base", num_dense_layers=LAYERS), length, settings)
        configs = {
            "BERT": bert,
            "gMLP": equal(_small(preset("gmlp_mlm_base"), length, settings), bert),
            "aMLP": equal(_small(preset("amlp_mlm_base"), length, settings), bert),
            "BERT, norms after": replace(bert, layer_norm="after"),
        }
        num_seqs = max(TOKENS // length // settings.scale // (2 if settings.quick else 1), 1)
        tokens_Bn = torch.randint(4, bert.vocab_size, (num_seqs, bert.max_tokens), device=settings.device)
        steps = {name: update(_build(config, settings), tokens_Bn) for name, config in configs.items()}
        theirs = peers.roberta(configs["BERT, norms after"])
        if theirs is not None:
            steps["RoBERTa"] = update(theirs.to(settings.device, settings.dtype).train(), tokens_Bn)
        seconds = interleaved(steps, 4 if settings.quick else min(settings.repeats, 7), settings.device)
        what = f"{num_seqs} x {bert.max_tokens} tokens"
        for name in ("gMLP", "aMLP"):
            layers = f"{configs[name].num_layers} layers, {what}"
            wanted = target if name == "gMLP" else None
            yield compared(SECTION, f"{name}, {layers}", seconds[name], "BERT", seconds["BERT"], wanted)
        if theirs is not None:
            after = seconds["BERT, norms after"]
            yield compared(SECTION, f"BERT, {what}", after, "fairseq's roberta", seconds["RoBERTa"], 1.0)


def _small(config: ModelConfig, length: int, settings: Settings) -> ModelConfig:
    width, hidden, vocabulary, context = settings.sized(config.embed_dim, config.ffn_dim, config.vocab_size, length)
    heads = config.num_heads if settings.scale == 1 else 1
    sizes = {"embed_dim": width, "ffn_dim": 2 * (hidden // 2), "vocab_size": max(vocabulary, 8), "num_heads": heads}
    return replace(config, max_tokens=context, **sizes)


def equal(config: ModelConfig, other: ModelConfig) -> ModelConfig:
    """Return the model with the number of layers whose cost comes nearest to another model's."""
    wanted = flops_per_token(other)
    deep = [replace(config, num_dense_layers=layers) for layers in range(1, 100)]
    return min(deep, key=lambda one: abs(flops_per_token(one) - wanted))


def _build(config: ModelConfig, settings: Settings) -> Encoder:
    torch.manual_seed(0)
    return Encoder(config).to(settings.device, settings.dtype).train()


def update(model: nn.Module, tokens_Bn: Tensor) -> Callable[[], None]:
    """Return a function that does one update, always on the same tokens; about every seventh is a target."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
    num_asked = tokens_Bn.size(0) * num_masked(tokens_Bn.size(1))
    asked_Bn = torch.zeros_like(tokens_Bn, dtype=torch.bool)
    asked_Bn.view(-1)[torch.arange(num_asked, device=tokens_Bn.device) * tokens_Bn.numel() // num_asked] = True
    targets_M = tokens_Bn[asked_Bn]

    def run() -> None:
        if isinstance(model, Encoder):
            loss = token_losses(model(tokens_Bn, asked_Bn), targets_M).mean()
        else:
            logits_MV = model(tokens_Bn, masked_tokens=asked_Bn)[0]
            loss = nn.functional.cross_entropy(logits_MV.float(), targets_M)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return run
