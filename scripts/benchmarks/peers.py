"""Other people's layers, as far as they are installed (``pip install -e .[bench]``)."""

from __future__ import annotations

import importlib
import os
import re
import tempfile
from collections.abc import Callable
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor, nn

from smlp.config import ModelConfig
from smlp.launch.machine import let_torchvision_load

#: what cannot be measured here, and why
absent: dict[str, str] = {}


def module(name: str, package: str) -> object | None:
    """Return a peer's module; None, with a note, where it cannot be imported."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError) as error:
        absent[package] = re.sub(r"/\S*/", "", str(error).partition("\n")[0])
        return None


@cache
def base_auction() -> tuple[str, Callable[[Tensor], Tensor]]:
    """Return BASE's balanced assignment: fairseq's compiled one where it loads, else the same auction in torch.

    Returns:
        Its name, and a function from scores (N, E) to the tokens in the order of their experts (N,).
    """
    libbase = module("fairseq.libbase", "fairseq.libbase")
    if libbase is not None:
        return "libbase", lambda scores: libbase.balanced_assignment(scores)
    return "BASE's auction (in torch)", auction


def auction(scores_NE: Tensor, max_rounds: int = 100) -> Tensor:
    """Assign tokens by the auction of Lewis et al. (2021): experts bid for the tokens that they value most.

    Each expert bids for its N/E best tokens at present prices by what they are worth beyond its next best one plus
    a step; a token goes to the highest bidder, who sees no price on it. E must divide N.
    """
    num_tokens, num_experts = scores_NE.shape
    worth_EN = scores_NE.t().contiguous()
    share = num_tokens // num_experts
    step = ((worth_EN.max() - worth_EN.min()) / 50).clamp_min(1e-4)
    value_EN, bid_EN = worth_EN.clone(), torch.zeros_like(worth_EN)
    price_N = worth_EN.new_zeros(num_tokens)
    held = None
    for number in range(10 * max_rounds):
        best = value_EN.topk(share + 1, dim=1)
        bid_EN.zero_().scatter_(1, best.indices[:, :share], best.values[:, :share] - best.values[:, share:] + step)
        if held is not None:
            bid_EN.view(-1)[held] = step if number < max_rounds else worth_EN.max()
        highest_N, bidder_N = bid_EN.max(dim=0)
        sold_N = (highest_N > 0).nonzero().squeeze(1)
        if sold_N.numel() == num_tokens:
            break
        price_N[sold_N] += highest_N[sold_N]
        value_EN = worth_EN - price_N
        held = bidder_N[sold_N] * num_tokens + sold_N
        value_EN.view(-1)[held] = worth_EN.view(-1)[held]
    return bidder_N.argsort(stable=True)


def alone_in_a_group() -> None:
    """Make a process group of a single process, which fairscale's layer needs."""
    if not dist.is_initialized():
        store = dist.FileStore(os.path.join(tempfile.mkdtemp(), "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)


def fairscale_layer(width: int, hidden: int, num_experts: int, num_choices: int) -> nn.Module | None:
    """Return fairscale's MOELayer with its top-2 gate, or with a top-1 gate of the same kind."""
    if module("fairscale.nn.moe", "fairscale") is None:
        return None
    from fairscale.nn.moe import MOELayer, Top2Gate

    alone_in_a_group()
    gate = Top2Gate(width, num_experts) if num_choices == 2 else _TopOneGate(width, num_experts)
    experts = [nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)) for _ in range(num_experts)]
    return MOELayer(gate, nn.ModuleList(experts))


class _TopOneGate(nn.Module):
    """Switch's gate for fairscale's layer, which brings only a top-2 gate: same masks, capacity N/E."""

    def __init__(self, width: int, num_experts: int) -> None:
        super().__init__()
        self.wg = nn.Linear(width, num_experts, bias=False)

    def forward(self, x_NH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gate_NE = self.wg(x_NH).softmax(dim=1)
        num_tokens, num_experts = gate_NE.shape
        capacity = num_tokens // num_experts
        chosen_NE = nn.functional.one_hot(gate_NE.argmax(dim=1), num_experts)
        place_NE = (chosen_NE.cumsum(dim=0) - 1) * chosen_NE
        balance = (gate_NE.mean(dim=0) * chosen_NE.float().mean(dim=0)).mean()
        chosen_NE = chosen_NE * (place_NE < capacity)
        place_NC = nn.functional.one_hot((place_NE * chosen_NE).sum(dim=1), capacity)
        combine_NEC = (gate_NE * chosen_NE).unsqueeze(2) * place_NC.unsqueeze(1)
        return balance, combine_NEC, combine_NEC.bool()


def transformer_lm(config: ModelConfig) -> nn.Module | None:
    """Return fairseq's transformer_lm of the same shape as our dense Transformer: pre-norm, sinusoidal positions."""
    if module("fairseq.models.transformer_lm", "fairseq") is None:
        return None
    from argparse import Namespace

    from fairseq.models.transformer_lm import TransformerLanguageModel, base_lm_architecture

    words = _words(config)
    options = Namespace(
        decoder_embed_dim=config.embed_dim,
        decoder_ffn_embed_dim=config.ffn_dim,
        decoder_layers=config.num_layers,
        decoder_attention_heads=config.num_heads,
        decoder_normalize_before=True,
        share_decoder_input_output_embed=True,
        activation_fn=config.activation,
        dropout=config.dropout,
        tokens_per_sample=config.max_tokens,
    )
    base_lm_architecture(options)
    options.max_target_positions = config.max_tokens
    return TransformerLanguageModel.build_model(options, Namespace(source_dictionary=words, target_dictionary=words))


def roberta(config: ModelConfig) -> nn.Module | None:
    """Return fairseq's RoBERTa of the same shape as a BERT of ours with its norms after the sublayers."""
    if module("fairseq.models.roberta", "fairseq") is None:
        return None
    from argparse import Namespace

    from fairseq.models.roberta import RobertaModel, base_architecture

    words = _words(config)
    options = Namespace(
        encoder_embed_dim=config.embed_dim,
        encoder_ffn_embed_dim=config.ffn_dim,
        encoder_layers=config.num_layers,
        encoder_attention_heads=config.num_heads,
        activation_fn=config.activation,
        dropout=config.dropout,
        attention_dropout=config.attention_dropout,
        max_positions=config.max_tokens,
    )
    base_architecture(options)
    return RobertaModel.build_model(options, Namespace(source_dictionary=words, target_dictionary=words))


def timm() -> object | None:
    """Return timm, which has the same image models."""
    let_torchvision_load()
    return module("timm", "timm")


def _words(config: ModelConfig) -> object:
    """Return a dictionary of as many symbols as a model has."""
    from fairseq.data import Dictionary

    words = Dictionary()
    for number in range(config.vocab_size - len(words)):
        words.add_symbol(str(number))
    return words
