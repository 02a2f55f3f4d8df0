"""Which of two models is ahead in what: this report's reading of the paper, as data."""

from __future__ import annotations

from dataclasses import dataclass

from smlp.experiments.report import paper

PERPLEXITY, SPEED, ACCURACY = "perplexity", "words per second", "zero-shot accuracy"
SAME_TIME = "perplexity at equal training time"
_SPARSE_TRANSFORMERS = ("gshard_lm", "switch_lm", "base_lm", "hash_lm")


@dataclass(frozen=True)
class Statement:
    """``first`` has a lower (or higher) figure than ``second``; both are keys of :data:`paper.NAMES`."""

    figure: str
    first: str
    second: str
    is_lower: bool
    where: str
    #: the paper's first over second, less one, per cent; None where it prints no numbers
    printed: float | None = None


def statements(size: str) -> list[Statement]:
    """What the paper says of sMLP.

    Args:
        size: of its models, ``small`` or ``large``: whose Table 4 has the numbers.
    """
    return [
        *_table_4(size, PERPLEXITY, "perplexity", is_lower=True),
        *(Statement(PERPLEXITY, "smlp", dense, True, "Figure 4") for dense in ("dense_lm", "gmlp_lm")),
        *(Statement(PERPLEXITY, "smlp_partial", rival, True, "Figure 5, top") for rival in _SPARSE_TRANSFORMERS),
        *(Statement(SAME_TIME, "smlp", rival, True, "Figure 5, bottom") for rival in _SPARSE_TRANSFORMERS),
        *_table_4(size, SPEED, "words_per_second", is_lower=False),
        *(_accuracy(rival) for rival in _SPARSE_TRANSFORMERS),
        Statement(PERPLEXITY, "smlp_leaky", "smlp", True, "Figure 7"),
    ]


def moe_statement(experts: int, second: str, second_experts: int) -> Statement:
    """What it says of gMLP-MoE: worse than gMLP, and the more so the more experts.

    Args:
        experts: of the gMLP-MoE.
        second: ``gmlp_lm``, or ``gmlp_moe`` with fewer experts.
        second_experts: of that; 0 for gMLP.
    """
    numbers = [paper.TABLE_7.get(count) for count in (experts, second_experts)]
    printed = None if None in numbers else _percent(*numbers)
    return Statement(PERPLEXITY, "gmlp_moe", second, False, "Table 7", printed)


def _table_4(size: str, figure: str, field: str, is_lower: bool) -> list[Statement]:
    rows = {name: getattr(row, field) for name, row in paper.TABLE_4[size].items()}
    own = rows.pop("smlp")
    where = paper.SCALES[size].table
    return [Statement(figure, "smlp", name, is_lower, where, _percent(own, value)) for name, value in rows.items()]


def _accuracy(rival: str) -> Statement:
    printed = _percent(paper.TABLE_6["smlp"]["average"], paper.TABLE_6[rival]["average"])
    return Statement(ACCURACY, "smlp", rival, False, "Table 6, average", printed)


def _percent(first: float, second: float) -> float:
    return 100 * (first / second - 1)
