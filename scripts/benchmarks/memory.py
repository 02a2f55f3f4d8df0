"""Memory of a whole update against what the formula says."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.report import Row
from benchmarks.settings import VOCABULARY, Settings, matched
from benchmarks.timing import peak_extra_bytes
from benchmarks.updates import build, update
from smlp.costs.memory import update_memory

SECTION = "Peak memory of an update"
ARCHS = ("smlp", "smlp_partial", "gmlp_lm", "gmlp_moe", "switch_lm", "gshard_lm", "base_lm", "hash_lm", "dense_lm")
IN_SHORT = ("smlp",)


def rows(settings: Settings) -> Iterator[Row]:
    """Compare weights, gradients, moments and activations, which need not all exist at once, with the formula's."""
    num_seqs = 1 if settings.scale > 1 else 2
    for arch, found in matched(settings, list(IN_SHORT if settings.quick else ARCHS)).items():
        model = build(found.config, settings)
        length, bytes_each = found.config.max_tokens, model.embedding.weight.element_size()
        tokens_Bn = torch.randint(4, settings.sized(VOCABULARY)[0], (num_seqs, length), device=settings.device)
        run = update(model, tokens_Bn)
        run()  # moments are made in the first one
        by_formula = update_memory(found.config, num_seqs * length, bytes_each=bytes_each)
        held = sum(3 * weight.numel() * weight.element_size() for weight in model.parameters())
        peak = (held + peak_extra_bytes(run, settings.device)) / 2**20
        expected = by_formula.total / 2**20
        what = f"{arch}, {num_seqs} x {length} tokens"
        yield Row(SECTION, what, peak, "by formula", expected, "MiB", expected / peak, 1 / 1.15)
