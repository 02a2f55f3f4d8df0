"""Writing one token with what is kept of earlier ones, against computing all of them again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.report import Row, compared
from benchmarks.settings import VOCABULARY, Settings, drawn, matched
from benchmarks.timing import interleaved
from smlp.nn.decoder import Decoder
from smlp.nn.state import DecodingState

SECTION = "Decoding the last token of the context"
#: how often the token is written in a row, as in a text: a step finds in the cache what the one before it left
STEPS = 8


def rows(settings: Settings) -> Iterator[Row]:
    """Yield a row for each architecture and number of sequences."""
    archs = ["smlp"] if settings.quick else ["smlp", "gmlp_lm", "smlp_partial", "switch_lm", "dense_lm"]
    matches = matched(settings, archs)
    for arch in archs:
        model = drawn(matches[arch].config, settings).eval()
        for num_seqs in (1, 8):
            length = model.config.max_tokens
            tokens_Bn = torch.randint(4, settings.sized(VOCABULARY)[0], (num_seqs, length), device=settings.device)
            steps = {"cached": _step(model, tokens_Bn), "again": partial(model, tokens_Bn)}
            with torch.inference_mode():
                seconds = interleaved(steps, 2 if settings.quick else min(settings.repeats, 7), settings.device)
            what = f"{arch}, {num_seqs} x {length} tokens"
            yield compared(SECTION, what, seconds["cached"] / STEPS, "all of them again", seconds["again"], 50.0)


def _step(model: Decoder, tokens_Bn: torch.Tensor) -> Callable[[], object]:
    """Return a function that writes the token :data:`STEPS` times; earlier positions are in a state made here."""
    state = DecodingState()
    with torch.inference_mode():
        model(tokens_Bn[:, :-1], state)

    def run() -> None:
        for _ in range(STEPS):
            state.length = tokens_Bn.size(1) - 1
            model(tokens_Bn[:, -1:], state)

    return run
