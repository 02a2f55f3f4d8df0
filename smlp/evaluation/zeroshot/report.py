"""Numbers of a task, as a plain dictionary, and tables of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from smlp.evaluation.zeroshot.evaluate import Answer, Task
from smlp.evaluation.zeroshot.readers import RecordItem
from smlp.evaluation.zeroshot.rules import best_f1, exact_match, standard_error, wilson_interval
from smlp.inference.scoring.texts import common_prefix

#: columns of the paper's Table 6 (Yu et al., 2022), in its order
TABLE_6 = {
    "copa": "COPA",
    "piqa": "PIQA",
    "storycloze": "StoryCloze",
    "winogrande": "Winogrande",
    "hellaswag": "HellaSwag",
    "record": "ReCoRD",
}


def summarise(task: Task, answers: Sequence[Answer], prefix_tokens: int) -> dict[str, Any]:
    """Return the accuracy with its uncertainty and the figures to compare it with; shares, not per cent.

    Args:
        task: as read.
        answers: of the model, to all its records.
        prefix_tokens: P, of the model.
    """
    count = len(answers)
    right = {rule: _mean([answer.is_right(rule) for answer in answers]) for rule in answers[0].chosen}
    accuracy = right[task.rule]
    low, high = wilson_interval(accuracy, count)
    prepared = task.prepared
    summary = {
        "split": task.split,
        "fewshot_split": task.fewshot_split,
        "n": count,
        "num_records": task.num_records,
        "num_repeated": task.num_repeated,
        "num_alike": task.num_alike,
        "num_shared_ids": task.num_shared_ids,
        "num_skipped": prepared.num_skipped,
        "num_truncated": prepared.num_truncated,
        "num_partly_scored": prepared.num_partly_scored(prefix_tokens),
        "rule": task.rule,
        "accuracy": accuracy,
        "standard_error": standard_error(accuracy, count) if count > 1 else None,
        "wilson_95": [low, high],
        "chance": _mean([len(answer.example.gold) / len(answer.example.choices) for answer in answers]),
        "majority": _majority(answers),
        "accuracy_by_rule": right,
        "unknown_share": prepared.num_unknown / max(prepared.num_tokens, 1),
    }
    if isinstance(answers[0].example.item, RecordItem):
        guesses = [(_guess(answer, task.rule), answer.example.item.answers) for answer in answers]
        summary["exact_match"] = _mean([exact_match(*guess) for guess in guesses])
        summary["f1"] = _mean([best_f1(*guess) for guess in guesses])
    return summary


def _guess(answer: Answer, rule: str) -> str:
    return answer.example.choices[answer.chosen[rule]].bare


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _majority(answers: Sequence[Answer]) -> float | None:
    """Return the accuracy of always giving the most frequent answer; None where records differ in their candidates."""
    if isinstance(answers[0].example.item, RecordItem):
        return None
    return max(Counter(answer.example.gold[0] for answer in answers).values()) / len(answers)


def average(summaries: Mapping[str, Mapping[str, Any]]) -> float:
    """Return the mean accuracy of the tasks, with equal weights."""
    return _mean([summary["accuracy"] for summary in summaries.values()])


def json_rows(task: Task, answers: Sequence[Answer], prefix: str, symbols: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield one object for each record.

    Args:
        task: as read.
        answers: of the model.
        prefix: symbol before every text.
        symbols: of the model's dictionary, by id.
    """
    for answer, group in zip(answers, task.prepared.groups, strict=True):
        choices = answer.example.choices
        contexts = [choice.context for choice in choices]
        prompt = contexts[0][: common_prefix(contexts)]
        candidates = [
            {
                "text": (choice.context + choice.continuation)[len(prompt) :],
                "bare": choice.bare,
                "num_context_tokens": text.num_context,
                "num_tokens": len(text.tokens),
                "scored_tokens": [symbols[token] for token in text.tokens[len(text.tokens) - len(text.log_probs) :]],
                "log_probs": [round(float(value), 6) for value in text.log_probs],
                "scores": {rule: round(values[number], 6) for rule, values in answer.scores.items()},
            }
            for number, (choice, text) in enumerate(zip(choices, answer.texts, strict=True))
        ]
        yield {
            "task": task.name,
            "id": answer.example.id,
            "prefix": prefix,
            "num_filled": group.num_filled,
            "num_cut_tokens": group.num_cut,
            "prompt": prompt,
            "candidates": candidates,
            "rule": task.rule,
            "choice": answer.chosen[task.rule],
            "gold": list(answer.example.gold),
            "is_right": answer.is_right(task.rule),
        }


def table(summaries: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a line for each task, in per cent, and the accuracy by every rule."""
    heads = ("task", "n", "rule", "accuracy", "s.e.", "95 % interval", "chance", "majority", "cut", "left out", "<unk>")
    rows = [heads]
    for name, one in summaries.items():
        rows.append(
            (
                f"{name} ({one['split']})",
                str(one["n"]),
                one["rule"],
                _percent(one["accuracy"]),
                "-" if one["standard_error"] is None else _percent(one["standard_error"]),
                " to ".join(map(_percent, one["wilson_95"])),
                _percent(one["chance"]),
                "-" if one["majority"] is None else _percent(one["majority"]),
                str(one["num_truncated"]),
                str(one["num_skipped"]),
                _percent(one["unknown_share"]),
            )
        )
    rules = list(dict.fromkeys(rule for one in summaries.values() for rule in one["accuracy_by_rule"]))
    others = [("accuracy by rule", *rules)]
    for name, one in summaries.items():
        found = one["accuracy_by_rule"]
        others.append((name, *(_percent(found[rule]) if rule in found else "-" for rule in rules)))
    notes = [_notes(name, one) for name, one in summaries.items()]
    return "\n".join([_aligned(rows), *filter(None, notes), "", _aligned(others)])


def _notes(name: str, one: Mapping[str, Any]) -> str:
    notes = []
    if "f1" in one:
        notes.append(f"exact match {_percent(one['exact_match'])}, F1 {_percent(one['f1'])}")
    if one["n"] + one["num_skipped"] < one["num_records"]:
        notes.append(
            f"the first {one['n'] + one['num_skipped']} of {one['num_records']} records, in the order of the file, "
            "which is not a random sample"
        )
    for key, what in (
        ("num_partly_scored", "have candidates that begin within the model's prefix"),
        ("num_repeated", "appear in the file again with the same id and are counted once"),
        ("num_alike", "repeat another record under a different id and are counted"),
        ("num_shared_ids", "have the same id as a different record"),
    ):
        if one[key]:
            notes.append(f"{one[key]} records {what}")
    return f"{name}: {'; '.join(notes)}" if notes else ""


def table_6(summaries: Mapping[str, Mapping[str, Any]], model: str) -> str:
    """Return the tasks side by side as in the paper's Table 6, in per cent, with their average."""
    columns = [name for name in TABLE_6 if name in summaries]
    rows = [("accuracy, %", *(TABLE_6[name] for name in columns), "average")]
    for label, key in ((model, "accuracy"), ("chance", "chance")):
        values = [summaries[name][key] for name in columns]
        rows.append((label, *map(_percent, values), _percent(_mean(values))))
    return _aligned(rows)


def _percent(share: float) -> str:
    return f"{100 * share:.2f}"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for first, *rest in rows:
        cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]))
    return "\n".join(lines)
