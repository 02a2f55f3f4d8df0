"""ReCoRD for the harness, whose own version cannot be loaded without the package ``transformers``.

Prompts are the harness's (:mod:`smlp.evaluation.zeroshot.templates`), exact match and F1 those of the official script.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from smlp.evaluation.zeroshot.items import RecordItem
from smlp.evaluation.zeroshot.metrics import best_f1, exact_match
from smlp.evaluation.zeroshot.templates import example

#: of the harness's task
CONFIGURATION: dict[str, Any] = {
    "output_type": "multiple_choice",
    "doc_to_text": "prompt",
    "doc_to_choice": "choices",
    "doc_to_target": "gold",
    "target_delimiter": "",
    "metric_list": [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("f1", "em")],
    "metadata": {"version": 2.0},
}
FUNCTIONS = {"process_results": f"{__name__}.process_results"}


def row(item: RecordItem) -> dict[str, Any]:
    """A record as the task above reads it."""
    written = example(item, "lm-eval")
    return {
        "prompt": written.choices[0].context,
        "choices": [choice.continuation for choice in written.choices],
        "gold": written.gold[0],
        "entities": [choice.bare for choice in written.choices],
        "answers": list(item.answers),
    }


def process_results(doc: dict[str, Any], results: Sequence[tuple[float, bool]]) -> dict[str, float]:
    """F1 and exact match of the entity with the highest log-probability."""
    guess = doc["entities"][int(np.argmax([log_prob for log_prob, _ in results]))]
    return {"f1": best_f1(guess, doc["answers"]), "em": exact_match(guess, doc["answers"])}
