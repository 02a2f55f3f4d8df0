"""A small SQuAD of each version in the official form, and a tokenizer folder of each kind for it."""

import json
from pathlib import Path

from data_prep.tokenize.models import pieces_of, train_byte_level, train_sentencepiece

RIVER = "The Danube — 2,850 km long — rises in the Black Forest.\nIt flows  through Ulm, Vienna and Budapest."
STONE = "Granite is a hard stone. “Red granite” comes from Aswan; the ancient Egyptians cut it (3000 BC)."
#: context, question, answers; without answers only in version 2
ASKED = [
    (RIVER, "How long is the Danube?", ["2,850 km", "2,850 km long"]),
    (RIVER, "Where does it rise?", ["the Black Forest", "in the Black Forest"]),
    (RIVER, "Which city comes first?", ["Ulm"]),
    (RIVER, "Who lives in Budapest?", []),
    (STONE, "What comes from Aswan?", ["“Red granite”", "Red granite"]),
    (STONE, "When was it cut?", ["3000 BC", "3000"]),
    (STONE, "How deep is the river?", []),
]


def question(number: int, context: str, text: str, answers: list[str], version: str) -> dict:
    found = [{"text": answer, "answer_start": context.index(answer)} for answer in answers]
    row = {"question": text, "id": f"{number:024x}", "answers": found}
    if version == "v2.0":
        row["is_impossible"] = not answers
        if not answers:
            row["plausible_answers"] = [{"text": context[4:9], "answer_start": 4}]
    return row


def squad_json(version: str) -> dict:
    """The content of an official file, of version ``v1.1`` or ``v2.0``."""
    paragraphs = [
        {
            "context": context,
            "qas": [
                question(number, there, text, answers, version)
                for number, (there, text, answers) in enumerate(ASKED)
                if there == context and (answers or version == "v2.0")
            ],
        }
        for context in (RIVER, STONE)
    ]
    return {"version": version, "data": [{"title": "Things", "paragraphs": paragraphs}]}


def write_squad(folder: Path) -> dict[str, Path]:
    """Write both versions; return their files."""
    folder.mkdir(exist_ok=True)
    files = {version: folder / f"{version}.json" for version in ("v1.1", "v2.0")}
    for version, path in files.items():
        path.write_text(json.dumps(squad_json(version)), encoding="utf-8")
    return files


def write_tokenizer(folder: Path, kind: str) -> Path:
    """Write a tokenizer whose pieces are mostly characters (``unigram``) or bytes (``gpt2``)."""
    folder.mkdir()
    lines = [*RIVER.split("\n"), STONE, *(text for _, text, _ in ASKED)]
    if kind == "gpt2":
        for name, content in train_byte_level(iter(lines), 270).items():
            (folder / name).write_bytes(content)
        symbols = list(map(str, range(270)))
    else:
        model = train_sentencepiece(iter(lines), 70, kind)
        (folder / "sentencepiece.model").write_bytes(model)
        symbols = pieces_of(model)
    (folder / "dict.txt").write_text("".join(f"{symbol} 1\n" for symbol in symbols), encoding="utf-8")
    return folder
