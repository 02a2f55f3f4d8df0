"""Build a corpus from the user's own files: ``python -m data_prep.text_files --text FILE... --out DIR``.

A paragraph is a line; empty lines separate documents, and so does the end of a file. Every 20th paragraph is held out,
in turn for valid and for test; a paragraph that repeats a held-out one is removed from the other splits, so that no
text is in two. :mod:`data_prep.corpus` describes the files written.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
from collections import Counter
from pathlib import Path

from data_prep.corpus import FILES, SPLITS, Document, Splits, assert_disjoint, build_corpus, write_corpus
from smlp.cli.main import guarded
from smlp.errors import UserError
from smlp.files import read_bytes

HOLD_OUT_EVERY = 20  # paragraphs
MIN_PARAGRAPHS = 2 * HOLD_OUT_EVERY  # with fewer, test would be empty


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file, without a byte-order mark.

    Raises:
        UserError: it is missing, unreadable, blank, or not UTF-8 (with line and byte offset).
    """
    return _text_of(path, _content_of(path))


def _content_of(path: Path) -> bytes:
    try:
        return read_bytes(path)
    except OSError as error:
        raise UserError(f"text file {path} cannot be read: {error.strerror}") from error


def _text_of(path: Path, content: bytes) -> str:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # The codec counts positions from the first byte after a byte-order mark.
        offset = error.start + len(content) - len(error.object)
        line = content.count(b"\n", 0, offset) + 1
        raise UserError(
            f"text file {path} is not UTF-8: byte 0x{content[offset]:02x} at byte offset {offset}, line {line}"
        ) from error
    if not text.strip():
        raise UserError(f"text file {path} is empty: {len(content)} bytes, no word")
    return text


def documents_of(text: str, group: str) -> list[Document]:
    """Return the documents between empty lines.

    Soft hyphens are dropped, and the joiners U+200C and U+200D stay. Runs of spaces and other characters that cannot be
    printed, such as control characters and those for private use, become one space.
    """
    documents: list[list[str]] = [[]]
    for line in text.replace("\u00ad", "").split("\n"):
        paragraph = " ".join("".join(c if c.isprintable() or c in "\u200c\u200d" else " " for c in line).split())
        if paragraph.strip("\u200c\u200d "):
            documents[-1].append(paragraph)
        elif documents[-1]:
            documents.append([])
    return [Document(group, tuple(paragraphs)) for paragraphs in documents if paragraphs]


def split_by_line(documents: list[Document], removed: Counter[str]) -> Splits:
    """Put paragraphs 20, 60, 100, ... into valid, 40, 80, 120, ... into test, the rest into train.

    No text is in two of them: where paragraphs repeat, test keeps its copy before valid, and valid before train;
    ``removed`` counts the others.
    """
    numbered: list[tuple[int, str, str]] = []  # document, split, paragraph
    count = 0
    for index, document in enumerate(documents):
        for paragraph in document.paragraphs:
            count += 1
            split = "train"
            if count % HOLD_OUT_EVERY == 0:
                split = ("test", "valid")[count // HOLD_OUT_EVERY % 2]
            numbered.append((index, split, paragraph))
    texts = {name: {paragraph for _, split, paragraph in numbered if split == name} for name in SPLITS}
    stronger = {"test": set(), "valid": texts["test"], "train": texts["test"] | texts["valid"]}
    kept: dict[str, dict[int, list[str]]] = {name: {} for name in SPLITS}
    for index, split, paragraph in numbered:
        if paragraph in stronger[split]:
            removed[f"paragraphs: in {split} and in another split"] += 1
        else:
            kept[split].setdefault(index, []).append(paragraph)
    return {
        name: [Document(documents[index].group, tuple(lines)) for index, lines in kept[name].items()] for name in SPLITS
    }


def build(out: Path, paths: list[Path]) -> dict:
    """Read, split and write; return the manifest.

    Raises:
        UserError: a file is bad or would be overwritten, or the text is too short.
    """
    for name, path in itertools.product(FILES, paths):
        if path.exists() and (out / name).exists() and path.samefile(out / name):
            raise UserError(f"--out {out} would overwrite the text file {path}: name another folder")
    documents, described = [], []
    for path in paths:
        content = _content_of(path)  # read once, for it may be a pipe
        text = _text_of(path, content)
        documents += documents_of(text, str(path))
        described.append({"name": str(path), "sha256": hashlib.sha256(content).hexdigest(), "chars": len(text)})
    num_paragraphs = sum(len(document.paragraphs) for document in documents)
    names = ", ".join(map(str, paths))
    if num_paragraphs < MIN_PARAGRAPHS:
        raise UserError(
            f"{names}: {num_paragraphs} lines of text are too few, at least {MIN_PARAGRAPHS} are needed "
            f"(every {HOLD_OUT_EVERY}th is held out)"
        )
    removed: Counter[str] = Counter()
    splits = split_by_line(documents, removed)
    empty = [name for name in SPLITS if not splits[name]]
    if empty:
        raise UserError(f"{names}: nothing is left for {empty[0]}, because its lines repeat lines of another split")
    assert_disjoint(splits, str)
    return write_corpus(out, splits, {"sources": described, "removed": dict(removed)})


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m data_prep.text_files",
        description="Build a corpus from UTF-8 text files: a paragraph a line, an empty line between documents.",
        epilog="example: python -m data_prep.text_files --text book.txt letters.txt --out data/mine",
    )
    parser.add_argument("--text", type=Path, nargs="+", required=True, metavar="FILE", help="UTF-8 text files")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the splits and manifest go")
    options = parser.parse_args(arguments)
    build_corpus(options.out, ", ".join(map(str, options.text)), lambda: build(options.out, options.text))


if __name__ == "__main__":
    raise SystemExit(guarded(main))
