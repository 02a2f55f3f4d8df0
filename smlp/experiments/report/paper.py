"""The paper's figures (Yu et al., 2022, "Efficient Language Modeling with Sparse all-MLP"), compared with results.

Models are named by their family (:data:`smlp.costs.match.FAMILIES`); ``switch_lm_enlarged`` is Table 4's "Switch
Transformer - Enlarge". The curves of Figures 1, 4, 5 and 7 are pictures without numbers: only what the text says about
them is here.
"""

from __future__ import annotations

from dataclasses import dataclass

from smlp.experiments.report.details import LAYOUT
from smlp.experiments.report.machine import describe_gpus
from smlp.experiments.report.results import Model, Results
from smlp.experiments.report.table import Cell, Column, Table, amount, label

SOURCE = "Yu et al., 2022 (arXiv:2203.06850)"
#: of the tables of masked language models
GMLP_SOURCE = "Liu et al., 2021 (arXiv:2105.08050)"
NAMES = {
    "dense_lm": "Transformer",
    "gmlp_lm": "gMLP",
    "smlp": "sMLP-deterministic",
    "smlp_partial": "sMLP-partial",
    "smlp_leaky": "sMLP (leaky routing)",
    "gmlp_moe": "gMLP-MoE",
    "gshard_lm": "GShard",
    "switch_lm": "Switch Transformer",
    "switch_lm_enlarged": "Switch Transformer, enlarged",
    "base_lm": "BASE Layers",
    "hash_lm": "HASH Layers",
    "gpt3": "GPT-3 (Brown et al., 2020)",
}


@dataclass(frozen=True)
class Scale:
    """The size of one of the paper's comparisons."""

    name: str
    table: str
    updates: int
    #: 32 GPUs x batch x gradient accumulation x context (Tables 8 and 10)
    tokens_per_update: int
    #: forward multiply-adds; the paper counts those of 2 x 1024 tokens
    flops_per_token: float
    gpus: int
    gpu: str
    #: parameters of sMLP-deterministic
    parameters: float

    @property
    def tokens(self) -> int:
        return self.updates * self.tokens_per_update


_GPU = "Nvidia V100 with 32 GB"
SMALL = Scale("small, 0.8 TFLOPs", "Table 4, top", 25_000, 32 * 4 * 4 * 1024, 0.83e12 / 2048, 32, _GPU, 3.50e9)
LARGE = Scale("large, 2.0 TFLOPs", "Table 4, bottom", 100_000, 32 * 2 * 8 * 1024, 2.125e12 / 2048, 32, _GPU, 9.41e9)
SCALES = {"small": SMALL, "large": LARGE}


@dataclass(frozen=True)
class Speed:
    """A row of Table 4."""

    parameters: float
    #: validation perplexity after the scale's updates
    perplexity: float
    #: "time to quality"
    hours: float
    words_per_second: float


TABLE_4: dict[str, dict[str, Speed]] = {
    "small": {
        "gshard_lm": Speed(3.48e9, 19.26, 27.54, 136e3),
        "switch_lm": Speed(3.48e9, 15.31, 20.67, 185e3),
        "base_lm": Speed(3.60e9, 18.16, 21.13, 178e3),
        "hash_lm": Speed(3.51e9, 13.57, 21.08, 176e3),
        "smlp": Speed(3.50e9, 13.46, 20.41, 192e3),
    },
    "large": {
        "gshard_lm": Speed(9.03e9, 14.5, 198, 115e3),
        "switch_lm": Speed(9.03e9, 10.45, 120, 139e3),
        "base_lm": Speed(10.31e9, 20.36, 115.13, 135e3),  # "(divergence)"
        "hash_lm": Speed(10.29e9, 16.69, 100, 141e3),
        "switch_lm_enlarged": Speed(10.31e9, 10.09, 140, 126e3),
        "smlp": Speed(9.41e9, 9.84, 112, 144e3),
    },
}


@dataclass(frozen=True)
class Details:
    """A row of Table 5: the large models."""

    #: TFLOPs of a forward pass
    flops: float
    parameters: float
    embed_dim: int
    ffn_dim: int
    sparse: int
    dense: int
    heads: int
    experts: int
    gpus: int


TABLE_5 = {
    "gshard_lm": Details(2.0, 9.03e9, 2048, 8192, 7, 7, 16, 64, 32),
    "switch_lm": Details(2.0, 9.03e9, 2048, 8192, 7, 7, 16, 32, 32),
    "base_lm": Details(2.0, 10.31e9, 2048, 8192, 8, 8, 16, 32, 32),
    "hash_lm": Details(2.0, 10.29e9, 2048, 8192, 8, 8, 16, 32, 32),
    "switch_lm_enlarged": Details(2.3, 10.31e9, 2048, 8192, 8, 8, 16, 32, 32),
    "smlp": Details(2.0, 9.41e9, 2048, 8192, 7, 22, 1, 32, 32),
}

#: Table 6, in per cent, for the large models: the six tasks by their names in ``smlp zeroshot``, and the mean
TABLE_6 = {
    "gpt3": {
        **{"copa": 73.0, "piqa": 72.9, "storycloze": 72.4, "winogrande": 57.4, "hellaswag": 51.0},
        **{"record": 82.1, "average": 68.13},
    },
    "gshard_lm": {
        **{"copa": 76.00, "piqa": 68.12, "storycloze": 67.88, "winogrande": 51.068, "hellaswag": 38.00},
        **{"record": 72.39, "average": 62.24},
    },
    "switch_lm": {
        **{"copa": 75.0, "piqa": 72.96, "storycloze": 73.33, "winogrande": 53.43, "hellaswag": 52.48},
        **{"record": 79.86, "average": 67.84},
    },
    "base_lm": {
        **{"copa": 63.00, "piqa": 63.82, "storycloze": 61.41, "winogrande": 50.98, "hellaswag": 30.22},
        **{"record": 60.70, "average": 55.02},
    },
    "hash_lm": {
        **{"copa": 64.00, "piqa": 63.77, "storycloze": 64.72, "winogrande": 51.70, "hellaswag": 33.04},
        **{"record": 67.15, "average": 57.40},
    },
    "smlp": {
        **{"copa": 79.00, "piqa": 72.96, "storycloze": 74.67, "winogrande": 54.31, "hellaswag": 54.53},
        **{"record": 73.42, "average": 68.15},
    },
}

#: Table 7: validation perplexity by number of experts; 0 is the dense gMLP
TABLE_7 = {0: 15.7, 32: 17.2, 64: 20.5}

#: Table 3 of Liu et al., 2021: perplexity of masked tokens by architecture, without the ending of its size
GMLP_TABLE_3 = {
    **{"bert_mlm": 4.37, "bert_mlm_rel": 4.26, "bert_mlm_rel_attn": 5.64, "mixer_mlm": 5.34},
    **{"gmlp_mlm_linear": 5.14, "gmlp_mlm_additive": 4.97, "gmlp_mlm_multiplicative": 4.53, "gmlp_mlm": 4.35},
}

#: Table 4 of Liu et al., 2021, by architecture and task: accuracy on SST-2 and on MNLI, matched
GMLP_TABLE_4 = {
    "bert_mlm_rel_6": {"SST-2": (90.4,), "MNLI": (81.5,)},
    "bert_mlm_rel_12": {"SST-2": (91.3,), "MNLI": (83.3,)},
    "bert_mlm_rel_24": {"SST-2": (92.1,), "MNLI": (85.2,)},
    "bert_mlm_rel_48": {"SST-2": (92.8,), "MNLI": (86.3,)},
    "gmlp_mlm_18": {"SST-2": (91.2,), "MNLI": (77.7,)},
    "gmlp_mlm_36": {"SST-2": (92.3,), "MNLI": (80.9,)},
    "gmlp_mlm_72": {"SST-2": (93.5,), "MNLI": (82.8,)},
    "gmlp_mlm_144": {"SST-2": (95.1,), "MNLI": (84.6,)},
}
GMLP_TABLE_4 |= {"bert_mlm_rel": GMLP_TABLE_4["bert_mlm_rel_12"], "gmlp_mlm": GMLP_TABLE_4["gmlp_mlm_36"]}
#: Table 6 of Liu et al., 2021, likewise: accuracy on SST-2 and on MNLI, matched and mismatched; F1 on SQuAD
GMLP_TABLE_6 = {
    "bert_mlm_base": {"SST-2": (93.8,), "MNLI": (85.6, 85.7), "SQuAD v1.1": (90.2,), "SQuAD v2.0": (78.6,)},
    "gmlp_mlm_base": {"SST-2": (94.2,), "MNLI": (83.7, 84.1), "SQuAD v1.1": (86.7,), "SQuAD v2.0": (70.1,)},
    "amlp_mlm_base": {"SST-2": (93.4,), "MNLI": (85.9, 85.8), "SQuAD v1.1": (90.7,), "SQuAD v2.0": (80.9,)},
    "bert_mlm_large": {"SST-2": (94.3,), "MNLI": (87.0, 87.4), "SQuAD v1.1": (92.0,), "SQuAD v2.0": (81.0,)},
    "gmlp_mlm_large": {"SST-2": (94.8,), "MNLI": (86.2, 86.5), "SQuAD v1.1": (89.5,), "SQuAD v2.0": (78.3,)},
    "amlp_mlm_large": {"SST-2": (94.8,), "MNLI": (88.4, 88.4), "SQuAD v1.1": (92.2,), "SQuAD v2.0": (85.4,)},
    "gmlp_mlm_xlarge": {"SST-2": (95.6,), "MNLI": (87.7, 87.7), "SQuAD v1.1": (90.9,), "SQuAD v2.0": (82.1,)},
}
#: what the same table repeats of Devlin et al., 2018, for models of these sizes; it has nothing on MNLI, mismatched
DEVLIN_IN_TABLE_6 = {
    "bert_mlm_base": {"SST-2": (92.7,), "MNLI": (84.4,), "SQuAD v1.1": (88.5,), "SQuAD v2.0": (76.3,)},
    "bert_mlm_large": {"SST-2": (93.7,), "MNLI": (86.6,), "SQuAD v1.1": (90.9,), "SQuAD v2.0": (81.8,)},
}

#: number of heads of attention or of the spatial gating unit (Tables 5, 8 and 9)
HEADS = {
    **{"dense_lm": 16, "gmlp_lm": 1, "smlp": 1},
    **{"gshard_lm": 16, "switch_lm": 16, "switch_lm_enlarged": 16, "base_lm": 16, "hash_lm": 16},
}

FIGURE_1 = (
    "The caption of Figure 1 gives sMLP twice the training efficiency of the sparse Transformers, without saying how "
    "that is counted."
)
FIGURE_5_UPDATES = (
    "In the upper part of Figure 5 sMLP-deterministic and sMLP-partial are both ahead of the sparse Transformers; "
    "the figure prints no numbers."
)
FIGURE_5_TIME = (
    "In the lower part of Figure 5 sMLP has the lowest perplexity after the same training time, ahead of the sparse "
    "Transformers; the figure prints no numbers."
)
FIGURE_4 = (
    "In Figure 4 the Transformer gains much from more heads, gMLP gains nothing although its parameters grow, and sMLP "
    "is ahead of both; the figure prints no numbers."
)
FIGURE_7 = (
    "In Figure 7 the routing that sees all tokens has the lowest perplexity, because it leaks the future (appendix B); "
    "the figure prints no numbers."
)


def closest_to_paper(results: Results, name: str) -> Model | None:
    """If several models of a family were run, return the one closest to the paper's.

    It has the paper's kind of experts, then the most experts, then the number of heads nearest to the paper's.

    Args:
        results: of an experiment.
        name: the paper's model, a key of :data:`NAMES`.

    Returns:
        the first of several that are equally close; None if there is none of the family. See :func:`is_of_the_paper`.
    """
    found = [model for model in results.models if model.paper_name == name]
    return max(found, key=_likeness, default=None)


def is_of_the_paper(model: Model) -> bool:
    """Return whether a model is what the paper means by its name: gated experts, and more than one of them."""
    return model.config.feature_experts == "gated" and model.num_experts != 1


def _likeness(model: Model) -> tuple[bool, int, int]:
    heads = abs(model.config.num_heads - HEADS.get(model.paper_name or "", model.config.num_heads))
    return is_of_the_paper(model), model.num_experts, -heads


def paper_details_table(results: Results) -> Table | None:
    """Make the rows of the paper's Table 5 for the families that were run; None if it has none of them."""
    names = {model.paper_name for model in results.models}
    columns = [
        Column("model", "paper's model", "Table 5"),
        *(Column(key, head, "Table 5") for key, (head, _) in LAYOUT.items()),
        Column("parameters_billions", "parameters (B)", "Table 5 (its head says M)"),
        Column("tflops", "TFLOPs (multiply-adds) of 2 x 1024 tokens", "Table 5"),
        Column("gpus", "GPUs", "Table 5"),
    ]
    source = f"{SOURCE}, Table 5"
    rows = [
        {
            "model": label(NAMES[name], source),
            **{key: amount(getattr(row, key), "d", source) for key in LAYOUT},
            "parameters_billions": amount(row.parameters / 1e9, ".2f", source),
            "tflops": amount(row.flops, ".1f", source),
            "gpus": amount(row.gpus, "d", source),
        }
        for name, row in TABLE_5.items()
        if name in names
    ]
    return Table("details-paper", "The paper's large models (Table 5)", columns, rows) if rows else None


def table_4(results: Results) -> Table | None:
    """Make the paper's Table 4 for the families that were run; None if it has none of them."""
    columns = [Column("model", "paper's model", "Table 4")]
    for size in ("small", "large"):
        columns += [
            Column(f"{size}_parameters", f"{size}: parameters (B)", "Table 4, Model Size"),
            Column(f"{size}_perplexity", "perplexity", f"Table 4, after {SCALES[size].updates:,} updates"),
            Column(f"{size}_hours", "hours", "Table 4, Time to Quality"),
            Column(f"{size}_words", "words/s", "Table 4, Speed"),
        ]
    rows = []
    for family in TABLE_4["large"]:
        if not any(family == model.paper_name for model in results.models):
            continue
        row = {"model": label(NAMES[family], SOURCE)}
        for size, table in TABLE_4.items():
            source = f"{SOURCE}, {SCALES[size].table}"
            if family in table:
                one = table[family]
                row[f"{size}_parameters"] = Cell(one.parameters, f"{one.parameters / 1e9:.2f}", source)
                row[f"{size}_perplexity"] = Cell(one.perplexity, f"{one.perplexity:g}", source)
                row[f"{size}_hours"] = Cell(one.hours, f"{one.hours:g}", source)
                row[f"{size}_words"] = Cell(one.words_per_second, f"{one.words_per_second:,.0f}", source)
        rows.append(row)
    notes = [
        f"The small models' hours cover all {SMALL.updates:,} updates: "
        f"{SMALL.tokens / 1e9:.1f} billion tokens (32 GPUs x 4 x 4 x 1024 an update, Table 8) at the printed "
        'words per second take 2 to 7 % less. So the "words" are tokens, as fairseq counts them, and "time to quality" '
        "is the time to each model's own final perplexity. The times to a common perplexity below are a fairer "
        "measure.",
    ]
    if any(model.paper_name == "base_lm" for model in results.models):
        notes.append("The paper remarks that its large BASE model diverged.")
    return Table("paper-table-4", "The paper's Table 4", columns, rows, notes) if rows else None


def scale_sentences(results: Results) -> list[str]:
    """Say how many times smaller this experiment is than the paper's."""
    tokens = results.trained_tokens
    flops = max(model.flops_per_token for model in results.models)
    parameters = max(model.num_parameters for model in results.models)
    where = describe_gpus(results)
    own = (
        f"Here: models of up to {_quantity(parameters)} parameters and {_quantity(flops)} forward multiply-adds per "
        f"token, {_quantity(tokens)} tokens ({results.updates:,} updates of {results.tokens_per_update:,}), "
        f"context {results.settings['tokens_per_sample']:,}, {where}."
    )
    sentences = [own]
    for scale in (SMALL, LARGE):
        sentences.append(
            f"The paper, {scale.name}: {_quantity(scale.parameters)} parameters (sMLP), "
            f"{_quantity(scale.flops_per_token)} forward multiply-adds per token, {_quantity(scale.tokens)} tokens "
            f"({scale.updates:,} updates of {scale.tokens_per_update:,}), context 1,024, {scale.gpus} {scale.gpu}: "
            f"{_times(scale.flops_per_token / flops)} the multiply-adds per token and {_times(scale.tokens / tokens)} "
            "the tokens of this experiment."
        )
    sentences.append(
        "Absolute numbers therefore cannot be compared with the paper's, nor can perplexities on other texts and "
        "vocabularies. Ratios and orders can be compared, with that difference of scale in mind."
    )
    return sentences


def _quantity(value: float) -> str:
    for size, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if value >= size:
            return f"{value / size:.3g} {word}"
    return f"{value:,.0f}"


def _times(ratio: float) -> str:
    return f"{ratio:,.0f} times" if ratio >= 10 else f"{ratio:.2g} times"
