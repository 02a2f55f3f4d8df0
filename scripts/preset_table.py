"""Write docs/presets.md: parameters and FLOPs of every preset, compared with the paper's.

    python scripts/preset_table.py

All of our numbers follow from smlp.costs.formula, which the tests hold against fvcore and the real modules.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from smlp.config import ModelConfig
from smlp.config.presets import PRESETS, preset
from smlp.costs.component import ATTENTION
from smlp.costs.formula import (
    MASKED_HEAD,
    components,
    default_world_size,
    flops_per_token,
    forward_flops,
    parameters,
)
from smlp.nn.blocks.gmlp import SPATIAL_GATING
from smlp.nn.blocks.smlp import FEATURE_MOE

PAGE = Path(__file__).resolve().parents[1] / "docs" / "presets.md"
NUM_SEQS = 2

# What Yu et al. (2022) print: preset, quantity, value (M, B or T), where, and which of the remarks below applies.
PAPER = [
    ("smlp", "expert", "113.44", "Table 8", "labels"),
    ("smlp", "other", "258.73", "Table 8", "labels"),
    ("smlp", "total", "3.50", "Table 4", "smlp total"),
    ("smlp", "FLOPs", "0.83", "Tables 8, 9", None),
    ("smlp_large", "expert", "277.1", "Table 10", "smlp_large"),
    ("smlp_large", "other", "682.6", "Table 10", "smlp_large"),
    ("smlp_large", "total", "9.41", "Tables 4, 5", "smlp_large total"),
    ("smlp_large", "FLOPs", "2.125", "Table 10", None),
    ("gmlp_lm", "other", "353.87", "Table 9", None),
    ("gmlp_lm", "FLOPs", "0.83", "Table 9", "gmlp_lm"),
    ("dense_lm", "other", "354.76", "Table 9", None),
    ("dense_lm", "FLOPs", "0.83", "Table 9", None),
    ("gshard_lm", "total", "3.48", "Table 4", "gshard_lm"),
    ("gshard_lm", "FLOPs", "0.8", "Table 4", "masks"),
    ("gshard_lm_large", "total", "9.03", "Tables 4, 5", "9.03 B"),
    ("gshard_lm_large", "FLOPs", "2.0", "Table 5", "masks"),
    ("switch_lm", "total", "3.48", "Table 4", "switch_lm"),
    ("switch_lm", "FLOPs", "0.8", "Table 4", "0.8 T"),
    ("switch_lm_large", "total", "9.03", "Tables 4, 5", "9.03 B"),
    ("switch_lm_large", "FLOPs", "2.0", "Table 5", "masks"),
    ("switch_lm_enlarged", "total", "10.31", "Tables 4, 5", "10.31 B"),
    ("switch_lm_enlarged", "FLOPs", "2.3", "Table 5", "masks"),
    ("base_lm", "expert", "100.75", "Table 8", None),
    ("base_lm", "other", "241.79", "Table 8", "base_lm"),
    ("base_lm", "total", "3.60", "Table 4", "base_lm total"),
    ("base_lm", "FLOPs", "0.83", "Table 8", "base_lm"),
    ("base_lm_large", "expert", "268.6", "Table 10", "base_lm_large"),
    ("base_lm_large", "other", "642.6", "Table 10", "base_lm_large"),
    ("base_lm_large", "total", "10.31", "Tables 4, 5", "10.31 B"),
    ("base_lm_large", "FLOPs", "2.0", "Table 5", "base_lm_large"),
    ("hash_lm", "total", "3.51", "Table 4", "hash_lm"),
    ("hash_lm", "FLOPs", "0.8", "Table 4", None),
    ("hash_lm_large", "total", "10.29", "Tables 4, 5", "10.31 B"),
    ("hash_lm_large", "FLOPs", "2.0", "Table 5", None),
]
# What Liu et al. (2021) print of masked language models: preset, M parameters, GFLOPs of one text (None where it prints
# none), where, and remark. After a preset may stand other layers, H (F is four times that) and heads.
MASKED = [
    ("bert_mlm", 110, None, "Table 3", None),
    ("bert_mlm_rel", 110, None, "Tables 3, 4", None),
    ("bert_mlm_rel_attn", 96, None, "Table 3", None),
    ("mixer_mlm", 112, None, "Table 3", "mixer"),
    ("gmlp_mlm_linear", 92, None, "Table 3", "unsplit"),
    ("gmlp_mlm_additive", 92, None, "Table 3", "unsplit"),
    ("gmlp_mlm_multiplicative", 92, None, "Table 3", "unsplit"),
    ("gmlp_mlm", 102, None, "Table 3", None),
    ("bert_mlm_rel_6", 67, None, "Table 4", None),
    ("bert_mlm_rel_24", 195, None, "Table 4", None),
    ("bert_mlm_rel_48", 365, None, "Table 4", None),
    ("gmlp_mlm_18", 59, None, "Table 4", None),
    ("gmlp_mlm_36", 102, None, "Table 4", None),
    ("gmlp_mlm_72", 187, None, "Table 4", None),
    ("gmlp_mlm_144", 357, None, "Table 4", None),
    ("bert_mlm_base", 110, 100.8, "Tables 5, 6", None),
    ("gmlp_mlm_base", 130, 158.0, "Tables 5, 6", "toeplitz"),
    ("amlp_mlm_base", 109, 128.9, "Tables 5, 6", None),
    ("bert_mlm_large", 336, 341.2, "Tables 5, 6", None),
    ("gmlp_mlm_large", 365, 430.1, "Tables 5, 6", None),
    ("amlp_mlm_large", 316, 370.3, "Tables 5, 6", None),
    ("gmlp_mlm_xlarge", 941, 1091.3, "Tables 5, 6", None),
    ("bert_mlm_rel", 110, None, "Table 10", None),
    ("bert_mlm_rel 24 512 8", 92, None, "Table 10", None),
    ("bert_mlm_rel 48 384 12", 98, None, "Table 10", None),
    ("bert_mlm_rel 96 256 8", 84, None, "Table 10", None),
]
UNITS = {"expert": (1e6, "M"), "other": (1e6, "M"), "total": (1e9, "B"), "FLOPs": (1e12, "T")}


def quantities(config: ModelConfig) -> dict[str, float]:
    """Count parameters (experts of one rank, the rest, the whole) and the multiply-adds of a batch of 2 x T."""
    params = parameters(config)
    flops = forward_flops(config, NUM_SEQS)
    return {"expert": params.expert_per_rank, "other": params.other, "total": params.total, "FLOPs": flops}


def show(quantity: str, value: float, digits: int) -> str:
    """Format a number with its unit."""
    scale, unit = UNITS[quantity]
    return f"{value / scale:.{digits}f} {unit}"


def difference(arch: str, quantity: str, printed: str) -> float:
    """Return the relative difference of our number from the paper's."""
    ours = quantities(preset(arch))[quantity] / UNITS[quantity][0]
    return round(ours / float(printed) - 1, 4) + 0.0  # no "-0.00 %"


def dispatch_masks(config: ModelConfig) -> float:
    """Return the multiply-adds of dense masks (tokens x experts x capacity) that dispatch and combine the tokens of a
    batch, at a capacity of k*N/E: 2 * N * (k * N) * H in every sparse layer."""
    num_tokens = NUM_SEQS * config.max_tokens
    slots = config.experts_per_token * num_tokens  # of all experts together
    return 2 * num_tokens * slots * config.embed_dim * config.num_sparse_layers


def remarks() -> dict[str, str]:
    """Describe where the paper contradicts itself or cannot be reproduced. Every number of ours is computed here."""

    def ours(arch: str, quantity: str, digits: int = 2, **layers: int) -> str:
        return show(quantity, quantities(replace(preset(arch), **layers))[quantity], digits)

    def with_masks(arch: str) -> str:
        config = preset(arch)
        return show("FLOPs", forward_flops(config, NUM_SEQS) + dispatch_masks(config), 2)

    gated = [arch for arch in PRESETS if arch.startswith(("gshard", "switch")) and not arch.endswith("_tiny")]
    masks = ", ".join(f"{with_masks(arch)} for `{arch}`" for arch in gated)
    fewer = {"num_dense_layers": 6, "num_sparse_layers": 6}
    return {
        "labels": "Table 9 prints the same two numbers with their labels swapped. The paper counts the norms of an "
        "s-MoE expert with the expert; ours are the same on every rank and count under other.",
        "smlp total": "Table 4's 3.50 B does not follow from Table 8, whose 32 x 113.44 M + 258.73 M make 3.89 B.",
        "smlp_large": "Table 10 swaps the two labels. It prints 20 dense and 8 sparse layers, Table 5 prints 22 and 7. "
        f"Only 22 + 8 give the parameters and the FLOPs: 20 dense layers leave other at "
        f"{ours('smlp_large', 'other', num_dense_layers=20)}, 7 sparse layers leave the experts at "
        f"{ours('smlp_large', 'expert', num_sparse_layers=7)}. Tables 2, 4 and 5 round the FLOPs to 2.0 T.",
        "smlp_large total": "Table 4's 9.41 B does not follow from Table 10, whose 32 x 277.1 M + 682.6 M make 9.55 B. "
        f"Nor from Table 5: with 7 sparse layers it would be {ours('smlp_large', 'total', num_sparse_layers=7)}.",
        "gmlp_lm": "Parameters need 41 layers; 0.83 T would need 42 "
        f"({ours('gmlp_lm', 'FLOPs', 3, num_dense_layers=42)}, {ours('gmlp_lm', 'other', num_dense_layers=42)}).",
        "switch_lm": "The paper does not print the layers of the small model; 12 + 12 with 32 experts give its size "
        "and the 0.83 T of Tables 8 and 9.",
        "0.8 T": "Tables 2 and 4 say 0.8 T where Tables 8 and 9 have 0.83 T.",
        "gshard_lm": "The paper does not print the layers of the small model; 9 + 9 give its FLOPs. The size is that "
        "of Switch, and does not follow from Table 5's 64 experts at any depth with these FLOPs: 6 + 6 layers would "
        f"have {ours('gshard_lm', 'total', **fewer)} and {ours('gshard_lm', 'FLOPs', **fewer)}.",
        "9.03 B": "One size is printed for GShard with 64 experts and Switch with 32 on the same 7 + 7 layers; it "
        "follows from neither.",
        "10.31 B": "32 x 268.6 M + 642.6 M of Table 10 make 9.24 B; 10.31 B (Hash: 10.29 B) does not follow from 8 + 8 "
        "layers.",
        "masks": "We count the experts' work only, k experts for each token. The paper measures with fvcore and says "
        "that GShard and Switch have larger FLOPs for the same structure (section 4.1): an implementation with dense "
        "dispatch masks (tokens x experts x capacity) multiplies with them to dispatch and to combine. At a capacity "
        f"of k*N/E tokens that would make it {masks}. Nothing here builds such masks. Table 5's 2.0 T and 2.3 T "
        "follow from neither count.",
        "base_lm": "Table 8 prints 12 dense layers. Its parameters need 11; its FLOPs need 12 "
        f"({ours('base_lm', 'FLOPs', 3, num_dense_layers=12)}, with {ours('base_lm', 'other', num_dense_layers=12)} "
        "of other parameters).",
        "base_lm total": "Table 4's 3.60 B does not follow from Table 8, whose 32 x 100.75 M + 241.79 M make 3.47 B.",
        "base_lm_large": "Table 10 swaps the two labels. It prints 2.125 T as well, as for sMLP; its own 8 + 8 layers "
        "have Table 5's 2.0 T.",
        "hash_lm": "As `base_lm` without centroids and with one norm for all experts of a layer; 3.51 B does not "
        "follow from 11 + 12 layers.",
    }


def masked_quantities(name: str) -> tuple[float, float, float]:
    """Return M parameters without and with the masked LM head, and GFLOPs of a text, two for a multiply-add."""
    arch, *sizes = name.split()
    settings = {}
    if sizes:
        layers, width, heads = map(int, sizes)
        settings = {"num_dense_layers": layers, "embed_dim": width, "ffn_dim": 4 * width, "num_heads": heads}
    config = replace(preset(arch), **settings)
    whole = sum(part.other_params for part in components(config))
    head = sum(part.other_params for part in components(config) if part.kind == MASKED_HEAD)
    return (whole - head) / 1e6, whole / 1e6, 2 * config.max_tokens * flops_per_token(config) / 1e9


def encoders_table() -> list[str]:
    """Return a row for each encoder."""
    lines = [
        "| preset | layers | T | parameters (M) | of these the masked LM head | GFLOPs |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for arch in PRESETS:
        config = preset(arch)
        if config.is_bidirectional:
            without, params, flops = masked_quantities(arch)
            lines.append(
                f"| `{arch}` | {config.num_dense_layers} | {config.max_tokens} | {params:.2f} | {params - without:.2f} "
                f"| {flops:.2f} |"
            )
    return lines


def masked_table() -> list[str]:
    """Return a row for each number that Liu et al. (2021) print of masked language models."""
    lines = [
        "| preset | M parameters without head | with it | paper | GFLOPs | paper | difference | printed in | remark |",
        "|---|---:|---:|---:|---:|---:|---:|---|---|",
    ]
    for name, printed, printed_flops, where, remark in MASKED:
        without, params, flops = masked_quantities(name)
        arch, *sizes = name.split()
        shown = f"`{arch}`" + (" with {} layers, H = {}, {} heads".format(*sizes) if sizes else "")
        work = f"{flops:.1f} | {printed_flops} | {flops / printed_flops - 1:+.2%}" if printed_flops else "| |"
        counts = f"{without:.2f} | {params:.2f} | {printed}"
        lines.append(f"| {shown} | {counts} | {work} | {where} | {MASKED_REMARKS.get(remark, '')} |")
    return lines


def presets_table() -> list[str]:
    """Return a row for each language model."""
    lines = [
        "| preset | layers | E | ranks | expert per rank (M) | other (M) | total (M) | GFLOPs | MFLOPs per token |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for arch in PRESETS:
        if preset(arch).is_bidirectional:
            continue
        config, values = preset(arch), quantities(preset(arch))
        sparse = config.num_sparse_layers > 0
        lines.append(
            f"| `{arch}` | {config.num_dense_layers} + {config.num_sparse_layers} "
            f"| {config.num_experts if sparse else '-'} | {default_world_size(config) if sparse else '-'} "
            f"| {values['expert'] / 1e6:.2f} | {values['other'] / 1e6:.2f} | {values['total'] / 1e6:.2f} "
            f"| {values['FLOPs'] / 1e9:.2f} | {flops_per_token(config) / 1e6:.3f} |"
        )
    return lines


def paper_table(numbers: dict[str, int]) -> list[str]:
    """Return a row for each number that the paper prints."""
    lines = ["| preset | | ours | paper | difference | printed in | remark |", "|---|---|---:|---:|---:|---|---:|"]
    names = {"expert": "expert per rank", "other": "other parameters", "total": "all parameters", "FLOPs": "FLOPs"}
    for arch, quantity, printed, where, remark in PAPER:
        number = f"({numbers[remark]})" if remark else ""
        lines.append(
            f"| `{arch}` | {names[quantity]} | {show(quantity, quantities(preset(arch))[quantity], 3)} "
            f"| {printed} {UNITS[quantity][1]} | {difference(arch, quantity, printed):+.2%} | {where} | {number} |"
        )
    return lines


def modules_table() -> list[str]:
    """Return rows of Table 3: what mixes the tokens, at H = 1024, F = 4096."""
    lines = [
        "| module | heads | parameters (M) | paper | FLOPs (G) | paper |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    rows = [
        ("self-attention", 16, ATTENTION, preset("dense_lm"), 4.198, 12.885),
        ("self-attention", 1, ATTENTION, preset("dense_lm", num_heads=1), 4.198, 12.885),
        ("spatial gating unit", 16, SPATIAL_GATING, preset("gmlp_lm", num_heads=16), 16.798, 4.316),
        ("spatial gating unit", 1, SPATIAL_GATING, preset("gmlp_lm"), 1.054, 4.316),
        ("s-MoE, one expert", 1, FEATURE_MOE, preset("smlp"), 1.058, 4.387),
    ]
    for name, heads, kind, config, paper_params, paper_flops in rows:
        part = next(part for part in components(config) if part.kind == kind)
        flops = NUM_SEQS * config.max_tokens * part.flops_per_position
        lines.append(
            f"| {name} | {heads} | {(part.expert_params + part.other_params) / 1e6:.3f} | {paper_params} "
            f"| {flops / 1e9:.3f} | {paper_flops} |"
        )
    return lines


INTRODUCTION = """# Presets and the paper's tables

Written by `python scripts/preset_table.py`; do not edit. `smlp flops --arch NAME` shows the same by component, and
counts it once more with fvcore on the real module.

FLOPs are multiply-adds of the forward pass for a batch of 2 x T tokens, in fvcore's convention: a layer norm is 5 for
each element; attention and spatial products are counted in full, not as their causal half; activations, softmax and
residuals are 0. Every token costs the work of its k experts; nothing is padded or dropped. Layers are dense + sparse.
The E experts of a sparse layer are divided among the ranks in the table: the paper's 32, of which each holds two of
GShard's experts; in the tiny presets, one rank for each expert.
"""
AFTER_PRESETS = """
The tiny presets cost the same within 1 %. `smlp_partial` and `smlp_leaky` cost less than `smlp` because their spatial
experts are 0.8 T wide.

## Compared with the paper's numbers
"""
MASKED_REMARKS = {
    "unsplit": "the caption's F = 3072 would give 130 M; 92 M follows from F = 2048",
    "mixer": "the caption's 24 layers would give 140 M; 112 M follows from 18",
    "toeplitz": "full matrices would give 143 M",
}
MASKED_INTRODUCTION = """
## Masked language models

A text has T tokens; the head computes 15 % of them, the masked ones. Here a multiply-add is two FLOPs, as the
gMLP paper counts them.
"""
MASKED_PAPER = """
### Next to the numbers of the gMLP paper

The counts of Tables 3 and 10 follow with the masked LM head (a layer before the output, and the output's bias), those
of Tables 4 to 6 without it. FLOPs are computed with 15 % of the positions masked.
"""
AFTER_MODULES = """
Our self-attention includes the layer norm before it. Our s-MoE is an expert with the two layer norms that it shares,
and the work of all experts of a layer on the H features. The paper's FLOPs are near those of a gating unit on F/2 =
2048 features; its parameter counts (Tables 8 and 10) leave no room for a projection to that width.
"""


def page() -> str:
    """Return the whole page."""
    notes = remarks()
    cited = dict.fromkeys(remark for *_, remark in PAPER if remark)
    numbers = {name: number for number, name in enumerate(cited, start=1)}
    lines = [
        INTRODUCTION,
        *presets_table(),
        AFTER_PRESETS,
        *paper_table(numbers),
        "",
        "The paper prints no numbers for the other presets.",
        "",
        *(f"{number}. {notes[name]}" for name, number in numbers.items()),
        "",
        "## Table 3: what mixes the tokens",
        "",
        *modules_table(),
        AFTER_MODULES.rstrip("\n"),
        MASKED_INTRODUCTION,
        *encoders_table(),
        MASKED_PAPER,
        *masked_table(),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
