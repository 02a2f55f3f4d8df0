"""Layers of the paper's width in int8 against float32: CPU time and size."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.report import Row, compared
from benchmarks.settings import FULL_WIDTH, Settings
from benchmarks.timing import interleaved
from smlp.config.presets import preset
from smlp.inference.int8 import quantize
from smlp.inference.scoring.candidates import drop_nothing
from smlp.nn.decoder import Decoder

SECTION = "int8, CPU time of a forward pass, and size"
NUM_SEQS, LENGTH, SHORT = 4, 512, 16
MODELS = {
    "gmlp_lm": {"num_dense_layers": 1},
    "smlp_hash": {"num_dense_layers": 1, "num_sparse_layers": 1, "num_experts": 8},
    "dense_lm": {"num_dense_layers": 1},
}


def rows(settings: Settings) -> Iterator[Row]:
    """Yield a row for each architecture and length, and one for the size."""
    if settings.device != "cpu":
        return
    width, hidden, length, vocabulary = settings.sized(*FULL_WIDTH, LENGTH, 1000)
    for arch, layers in MODELS.items():
        config = preset(
            arch, embed_dim=width, ffn_dim=hidden, max_tokens=length, vocab_size=vocabulary, dropout=0.0, **layers
        )
        models = {name: Decoder(config).eval() for name in ("float32", "int8")}
        quantize(models["int8"])
        sizes = {}
        for name, model in models.items():
            drop_nothing(model)
            sizes[name] = sum(tensor.nbytes for tensor in model.state_dict().values()) / 2**20
        what = f"{arch}, {config.num_dense_layers} + {config.num_sparse_layers} blocks"
        for num_tokens in (length, min(SHORT, length)):
            tokens_Bn = torch.randint(4, vocabulary, (NUM_SEQS, num_tokens))
            passes = {name: partial(model, tokens_Bn) for name, model in models.items()}
            with torch.inference_mode():
                seconds = interleaved(passes, min(settings.repeats, 5), "cpu", time.process_time)
            case = f"{what}, {NUM_SEQS} x {num_tokens} tokens"
            yield compared(SECTION, case, seconds["int8"], "float32", seconds["float32"], 1.0)
        yield Row(SECTION, what, sizes["int8"], "float32", sizes["float32"], "MiB", sizes["float32"] / sizes["int8"])
