"""Build a corpus of the English in every Python installation: ``python -m data_prep.python_docs --out DIR``.

Sources are the language reference behind ``help()`` (``pydoc_data.topics``) and the docstrings of the standard
library and of the numeric packages that are installed. They are read from the source files (nothing is imported),
reduced to running sentences, freed of exact and near duplicates across the whole corpus, and split by package, so that
no paragraph is in two splits. A document is a module; :mod:`data_prep.corpus` describes the files written. The result
depends only on the versions of the interpreter and the packages, which the manifest names.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from data_prep.corpus import Document, Splits, assert_disjoint, build_corpus, write_corpus
from data_prep.docstrings import docstrings, source_files, text_blocks
from data_prep.prose import prose
from smlp.cli.main import guarded
from smlp.errors import UserError

# those that are not installed are skipped
PACKAGES = ("numpy", "scipy", "torch", "sympy", "mpmath", "networkx", "sklearn", "joblib", "matplotlib")
DISTRIBUTIONS = {"sklearn": "scikit-learn"}  # of packages that are imported under another name
HELD_OUT_SHARE = 0.045  # of all words, for each of valid and test
MAX_GROUP_SHARE = 0.01  # of all words: larger groups go to train, so that no package dominates a held-out split
SHINGLE_WORDS = 8
MAX_REPEATED_SHARE = 0.5  # of a paragraph's shingles that may occur earlier in the corpus

_NOT_WORD = re.compile(r"[\W_]+")


def near_duplicate_key(paragraph: str) -> str:
    """Return a key that ignores case, punctuation and spacing, and which digits there are, but not how many."""
    return _NOT_WORD.sub(" ", re.sub(r"\d", "0", paragraph.lower())).strip() or paragraph


def deduplicated(documents: Iterable[Document], removed: Counter[str]) -> list[Document]:
    """Remove repeated paragraphs: the first copy stays. Documents left empty are dropped.

    A near duplicate has the key of an earlier paragraph (:func:`near_duplicate_key`) or shares more than
    ``MAX_REPEATED_SHARE`` of its runs of ``SHINGLE_WORDS`` words with earlier ones. ``removed`` counts paragraphs.
    """
    texts: set[str] = set()
    keys: set[str] = set()
    word_ids: dict[str, int] = {}  # tuples of small integers hash faster, and alike in every process
    seen_shingles: set[tuple[int, ...]] = set()
    kept_documents = []
    for document in documents:
        kept = []
        for paragraph in document.paragraphs:
            key = near_duplicate_key(paragraph)
            words = [word_ids.setdefault(word, len(word_ids)) for word in key.split()]
            shingles = list(zip(*(words[start:] for start in range(SHINGLE_WORDS)), strict=False))
            repeated = sum(shingle in seen_shingles for shingle in shingles)
            if paragraph in texts:
                removed["paragraphs: exact duplicate"] += 1
            elif key in keys or repeated > MAX_REPEATED_SHARE * len(shingles):
                removed["paragraphs: near duplicate"] += 1
            else:
                kept.append(paragraph)
            texts.add(paragraph)
            keys.add(key)
            seen_shingles.update(shingles)
        if kept:
            kept_documents.append(Document(document.group, tuple(kept)))
    return kept_documents


@dataclass(frozen=True)
class SourceTree:
    """A tree of Python files whose docstrings are read; ``prefix`` begins the modules' names ("" for the library)."""

    name: str
    version: str
    root: Path
    prefix: str


def find_sources() -> list[SourceTree]:
    """Return the standard library and the installed ones of ``PACKAGES``, without importing any of them."""
    sources = [SourceTree("python", platform.python_version(), Path(sysconfig.get_path("stdlib")), "")]
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            continue
        try:
            version = importlib.metadata.version(DISTRIBUTIONS.get(name, name))
        except importlib.metadata.PackageNotFoundError:
            version = "unknown"
        sources.append(SourceTree(name, version, Path(spec.submodule_search_locations[0]), name))
    return sources


def group_of(path: Path, source: SourceTree) -> str:
    """Return the dotted name of the package a file lies in, or of the module if it is a package of its own.

    All modules of a package stay together, because they often repeat each other in other words.
    """
    parts = path.relative_to(source.root).with_suffix("").parts
    folders = parts[:-1] or (() if source.prefix else parts)
    return ".".join(filter(None, (source.prefix, *folders)))


def paragraphs_of(texts: Iterable[str], removed: Counter[str]) -> tuple[str, ...]:
    """Return the English paragraphs of docstrings; ``removed`` counts what each cleaning rule took away."""
    return tuple(
        paragraph for text in texts for block in text_blocks(text, removed) if (paragraph := prose(block, removed))
    )


def _read_module(path: Path) -> tuple[tuple[str, ...], Counter[str], int]:
    removed: Counter[str] = Counter()
    texts = docstrings(path.read_bytes())
    return paragraphs_of(texts, removed), removed, len(texts)


def read_topics(removed: Counter[str]) -> list[Document]:
    """Return the language reference behind ``help()``, a document and a group for each topic."""
    from pydoc_data.topics import topics

    return [
        Document(f"pydoc_data.topics.{name}", paragraphs_of([text], removed)) for name, text in sorted(topics.items())
    ]


def split_by_group(documents: list[Document]) -> Splits:
    """Put every group into one split; valid and test get ``HELD_OUT_SHARE`` of the words, or little more.

    Groups are taken in the order of a hash of their names (the same on every machine) until valid is full, then until
    test is full. Both get groups from all over the corpus, and their sizes do not depend on luck. They get less where
    the groups of at most ``MAX_GROUP_SHARE`` of the words are too few.
    """
    sizes: Counter[str] = Counter()
    for document in documents:
        sizes[document.group] += document.num_words
    total = sum(sizes.values())
    order = sorted(sizes, key=lambda name: hashlib.sha256(name.encode()).digest())
    split_of, filled = {}, Counter()
    for group in order:
        split_of[group] = "train"
        if sizes[group] > MAX_GROUP_SHARE * total:
            continue
        for split in ("valid", "test"):
            if filled[split] < HELD_OUT_SHARE * total:
                split_of[group] = split
                filled[split] += sizes[group]
                break
    splits: Splits = {"train": [], "valid": [], "test": []}
    for document in documents:
        splits[split_of[document.group]].append(document)
    return splits


def build(out: Path, sources: list[SourceTree]) -> dict:
    """Read, clean, deduplicate, split and write; return the manifest.

    Raises:
        UserError: the sources hold too few modules to fill three splits.
    """
    removed: Counter[str] = Counter()
    documents = read_topics(removed)
    described = [{"name": "pydoc_data.topics", "version": platform.python_version(), "docstrings": len(documents)}]
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        for source in sources:
            paths = list(source_files(source.root))
            num_docstrings = 0
            for path, (paragraphs, counts, found) in zip(
                paths, pool.map(_read_module, paths, chunksize=16), strict=True
            ):
                documents.append(Document(group_of(path, source), paragraphs))
                removed.update(counts)
                num_docstrings += found
            described.append(
                {"name": source.name, "version": source.version, "files": len(paths), "docstrings": num_docstrings}
            )
    splits = split_by_group(deduplicated(documents, removed))
    if not all(splits.values()):
        raise UserError(f"the docstrings of {len(sources)} sources hold too little text for three splits")
    assert_disjoint(splits, near_duplicate_key)
    return write_corpus(out, splits, {"sources": described, "removed": dict(removed)})


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m data_prep.python_docs",
        description="Build a corpus of English from the documentation inside this Python installation.",
        epilog="example: python -m data_prep.python_docs --out data/python-docs",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the splits and manifest go")
    options = parser.parse_args(arguments)
    sources = find_sources()
    names = ", ".join(f"{source.name} {source.version}" for source in sources)
    build_corpus(options.out, names, lambda: build(options.out, sources))


if __name__ == "__main__":
    raise SystemExit(guarded(main))
