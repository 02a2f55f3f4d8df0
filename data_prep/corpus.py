"""Corpora of the quickstart: documents of paragraphs, disjoint splits, files, manifest and exit status.

On disk a split is UTF-8 text with one paragraph a line and an empty line between documents. fairseq reads each line
as a sentence ending in ``</s>``: ``--sample-break-mode none`` then trains on the running stream of paragraphs, and an
empty line (a lone ``</s>``) tells the model, and ``--sample-break-mode complete_doc``, where a document ends.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.flow.streams import read_json
from smlp.files import check_no_other, write_whole

SPLITS = ("train", "valid", "test")
MANIFEST = "manifest.json"
_UNFINISHED = ".unfinished"  # what an interrupted call has written may be written over
FILES = (*(f"{name}.txt" for name in SPLITS), MANIFEST)


@dataclass(frozen=True)
class Document:
    """Paragraphs that belong together. ``group`` names what must stay in one split (a package, a file)."""

    group: str
    paragraphs: tuple[str, ...]

    @property
    def num_words(self) -> int:
        """Whitespace-separated words; a line end is no word."""
        return sum(len(paragraph.split()) for paragraph in self.paragraphs)


Splits = dict[str, list[Document]]


def assert_disjoint(splits: Splits, key: Callable[[str], str]) -> None:
    """Raise AssertionError if a paragraph, compared by ``key``, is in more than one split."""
    owner: dict[str, str] = {}
    for name, documents in splits.items():
        for document in documents:
            for paragraph in document.paragraphs:
                first = owner.setdefault(key(paragraph), name)
                assert first == name, f"a paragraph occurs in both {first} and {name}: {paragraph[:80]!r}"


def split_counts(documents: list[Document]) -> dict[str, int]:
    """Count documents, paragraphs, words and characters (without line ends) of a split."""
    paragraphs = [paragraph for document in documents for paragraph in document.paragraphs]
    return {
        "documents": len(documents),
        "paragraphs": len(paragraphs),
        "words": sum(document.num_words for document in documents),
        "chars": sum(map(len, paragraphs)),
    }


def write_corpus(out: Path, splits: Splits, manifest: dict[str, Any]) -> dict[str, Any]:
    """Write ``train.txt``, ``valid.txt``, ``test.txt`` and, last, ``manifest.json``, each whole or not at all.

    Return the manifest with the counts of every split added.

    Raises:
        UserError: ``out`` has one of these files, which no earlier call wrote.
    """
    texts = {
        f"{name}.txt": ("\n\n".join("\n".join(document.paragraphs) for document in splits[name]) + "\n").encode()
        for name in SPLITS
    }
    check_out(out)
    if not reopen(out):
        out.mkdir(parents=True, exist_ok=True)
        (out / _UNFINISHED).touch()
    for name, text in texts.items():
        write_whole(out / name, text)
    manifest = {**manifest, "splits": {name: split_counts(splits[name]) for name in SPLITS}}
    content = (json.dumps(manifest, indent=2, sort_keys=True) + "\n").encode()
    write_whole(out / MANIFEST, content)
    (out / _UNFINISHED).unlink(missing_ok=True)  # another call may have written there at the same time
    return manifest


def reopen(out: Path) -> bool:
    """Mark the corpus in a folder as unfinished, so that it is made anew; return False if there is none of ours."""
    if not _is_ours(out):
        return False
    (out / _UNFINISHED).touch()
    (out / MANIFEST).unlink(missing_ok=True)  # its presence marks the corpus as complete
    return True


def check_out(out: Path) -> None:
    """Refuse a folder with files of something else, which a corpus would replace.

    Raises:
        UserError: the message names the first one.
    """
    if not _is_ours(out):
        check_no_other(out, FILES)


def _is_ours(out: Path) -> bool:
    is_whole = (read_json(out / MANIFEST) or {}).keys() == {"sources", "removed", "splits"}
    return is_whole or (out / _UNFINISHED).is_file()


def describe_splits(manifest: dict[str, Any]) -> str:
    """Return a table for the terminal: what each split holds and its share of the words."""
    total = sum(counts["words"] for counts in manifest["splits"].values())
    lines = [f"{'split':<6}{'documents':>11}{'paragraphs':>12}{'words':>11}{'characters':>12}{'share':>8}"]
    for name, counts in manifest["splits"].items():
        lines.append(
            f"{name:<6}{counts['documents']:>11,}{counts['paragraphs']:>12,}{counts['words']:>11,}"
            f"{counts['chars']:>12,}{counts['words'] / total:>8.1%}"
        )
    return "\n".join(lines)


def build_corpus(out: Path, sources: str, build: Callable[[], dict[str, Any]]) -> None:
    """Call ``build``, which writes a corpus and returns its manifest, and print what it reads and writes."""
    check_out(out)  # now, not after the work
    print(f"reading {sources}", flush=True)
    print(describe_splits(build()))
    print(f"wrote {out}; {out / MANIFEST} says where it came from and what was removed")
