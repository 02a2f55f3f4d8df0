"""Small files of the six zero-shot tasks, in their official shapes, about words that a tiny model knows."""

from __future__ import annotations

import json
import random
from pathlib import Path

WORDS = [f"w{number}" for number in range(30)]
_CLOZE = "cloze_test_{0}__spring2016 - cloze_test_ALL_{0}.csv"


def _sentence(draw: random.Random, low: int, high: int) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(low, high))) + " ."


def _lines(path: Path, rows: list) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{row if isinstance(row, int) else json.dumps(row)}\n" for row in rows), encoding="utf-8")


def _spans(text: str, words: list[str]) -> list[dict]:
    places = [(text.index(f" {word} ") + 1, word) for word in words]
    return [{"start": start, "end": start + len(word) - 1, "text": word} for start, word in places]


def write_tasks(folder: Path, count: int = 6) -> Path:
    """Writes all six tasks, each with ``count`` records to score and as many for priming; returns the folder."""
    draw = random.Random(5)

    def sentence(low: int = 2, high: int = 6) -> str:
        return _sentence(draw, low, high)

    def each(split: str, make) -> list:
        return [make(split, number) for number in range(count)]

    def copa(split: str, number: int) -> dict:
        texts = {"premise": sentence(), "choice1": sentence(1, 3), "choice2": sentence(1, 3)}
        return {**texts, "question": draw.choice(["cause", "effect"]), "label": number % 2, "idx": number}

    def piqa(split: str, number: int) -> dict:
        return {"goal": sentence(), "sol1": sentence(), "sol2": sentence() + " unheard"}

    def winogrande(split: str, number: int) -> dict:
        first, second = draw.sample(WORDS, 2)
        blank = f"{sentence()[:-2]} _ {sentence()}"
        return {"qID": f"{split}{number}", "sentence": blank, "option1": first, "option2": second, "answer": "1"}

    def hellaswag(split: str, number: int) -> dict:
        a, b = sentence(), sentence()[:-2]
        endings = [sentence(1, 6) for _ in range(4)]
        return {
            "ind": number, "activity_label": "w1", "ctx_a": a, "ctx_b": b, "ctx": f"{a} {b}", "endings": endings,
            "label": draw.randrange(4),
        }  # fmt: skip

    def record(split: str, number: int) -> dict:
        names = draw.sample(WORDS, 3)
        text = f"{sentence()} {' , '.join(names)} .\n@highlight\n{sentence()}"
        spans = _spans(text, names)
        query = f"{sentence()[:-2]} @placeholder {sentence()}"
        entities = [{"start": span["start"], "end": span["end"]} for span in spans]
        return {
            "source": "none", "passage": {"text": text, "entities": entities},
            "qas": [{"query": query, "answers": [draw.choice(spans)], "idx": number}], "idx": number,
        }  # fmt: skip

    def story(split: str, number: int) -> str:
        return ",".join([f"{split}-{number}", *(sentence() for _ in range(6)), str(1 + number % 2)])

    for split, file in (("val", "val.jsonl"), ("train", "train.jsonl")):
        _lines(folder / "copa" / file, each(split, copa))
        _lines(folder / "record" / file, each(split, record))
        _lines(folder / "hellaswag" / f"hellaswag_{file}", each(split, hellaswag))
    for split, stem in (("val", "valid"), ("train", "train")):
        _lines(folder / "piqa" / f"{stem}.jsonl", each(split, piqa))
        _lines(folder / "piqa" / f"{stem}-labels.lst", [draw.randrange(2) for _ in range(count)])
    for stem in ("dev", "train_s"):
        _lines(folder / "winogrande" / f"{stem}.jsonl", each(stem, winogrande))
    head = [f"InputSentence{n}" for n in (1, 2, 3, 4)] + ["RandomFifthSentenceQuiz1", "RandomFifthSentenceQuiz2"]
    header = ",".join(["InputStoryid", *head, "AnswerRightEnding"])
    for split in ("test", "val"):
        path = folder / "storycloze" / _CLOZE.format(split)
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join([header, *each(split, story)]) + "\n", encoding="utf-8")
    return folder
