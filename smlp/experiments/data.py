"""The data of an experiment: made from text if the file names some, checked, and described."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_prep.flow.streams import sha256_of
from smlp.errors import UserError
from smlp.evaluation.report import decoded_sizes
from smlp.experiments.folder import Folder
from smlp.experiments.json_files import read_json, write_json
from smlp.experiments.spec import Experiment, TextSource, option_words
from smlp.launch.local import run_logged, this_program
from smlp.text.binarized import num_tokens, read_fairseq_tokens
from smlp.text.tokenizer import Tokenizer, Vocabulary, load_tokenizer
from smlp.text.tokenizer_files import DICTIONARY, find_tokenizer

_MANIFEST = "manifest.json"


def data_of(experiment: Experiment, folder: Folder) -> str:
    """Return the argument DATA of every run; if the experiment names text, make the data first.

    Raises:
        UserError: data or text are missing or damaged.
    """
    if experiment.text is None:
        for one in experiment.data.split(":"):
            if not (Path(one) / DICTIONARY).is_file():
                raise UserError(f"{experiment.path}: data {one} has no {DICTIONARY}: smlp data binarize writes one")
        return experiment.data
    made = folder.path / "data"
    write_json(folder.path / "text.json", check_same_text(experiment.text, folder, to_keep=True))
    if not (made / _MANIFEST).is_file():
        _make(experiment.text, folder.path)
    return str(made)


def argument(experiment: Experiment, folder: Folder) -> str:
    """Return the argument DATA of every run, whether the data exist yet or not."""
    return str(folder.path / "data") if experiment.text else experiment.data


def find_data(experiment: Experiment, folder: Folder) -> str | None:
    """Return the argument DATA if all of the data exist, else None; make nothing."""
    data = argument(experiment, folder)
    is_there = all((Path(one) / DICTIONARY).is_file() for one in data.split(":"))
    return data if is_there else None


def dictionary_size(experiment: Experiment, data: str | None) -> int:
    """Return the number of symbols of the dictionary; without data, the number that the file names.

    Raises:
        UserError: there are no data, and the file names no number.
    """
    if data is not None:
        return len(Vocabulary.load(Path(data.split(":")[0]) / DICTIONARY))
    size = experiment.text.vocab_size if experiment.text else experiment.vocab_size
    if size is None:
        raise UserError(
            f"{experiment.path}: data {experiment.data} does not exist: for a dry run without it, set vocab_size"
        )
    return size


def held_out_tokens(data: str, subsets: Sequence[str]) -> int:
    """Count the tokens of all splits that are scored.

    Raises:
        UserError: a split is missing or damaged.
    """
    return sum(num_tokens(Path(data.split(":")[0]) / subset) for subset in subsets)


def check_text(text: TextSource) -> None:
    """Check that all text files exist.

    Raises:
        UserError: one does not; the message names it.
    """
    missing = [str(path) for path in text.files if not path.is_file()]
    if missing:
        raise UserError(f"there is no text file {missing[0]}")


def check_subsets(experiment: Experiment, data: str) -> None:
    """Check that existing data have their tokenizer, and all splits that are to be scored.

    Raises:
        UserError: one is missing; the message names the split and the folder.
    """
    folder = Path(data.split(":")[0])
    try:
        load_tokenizer(folder)
    except UserError as error:
        raise UserError(f"{experiment.path}: data {folder}: {error}") from None
    for subset in experiment.evaluation.subsets:
        if not (folder / f"{subset}.idx").is_file():
            raise UserError(f"{experiment.path}: evaluate.subsets has {subset!r}, and {folder} has no {subset}.idx")


def check_same_text(text: TextSource, folder: Folder, to_keep: bool = False) -> dict[str, Any]:
    """Refuse a folder whose data were made from something else; return what ``text.json`` should hold, if asked to."""
    record = folder.path / "text.json"
    wanted = {"source": text.source, "files": [str(path) for path in text.files], "vocab_size": text.vocab_size}
    was_used = any((folder.path / made / _MANIFEST).is_file() for made in ("text", "data"))
    compares = record.is_file() and was_used
    if (compares or to_keep) and all(path.is_file() for path in text.files):
        wanted["sha256"] = [sha256_of(path) for path in text.files]
    found = read_json(record) if compares else wanted
    for name, value in wanted.items():
        if found.get(name, value) != value:
            raise UserError(
                f"the data in {folder.path} were made with text.{name} = {found[name]}, not {value}: give another --out"
            )
    return found


def _make(text: TextSource, folder: Path) -> None:
    """Make text, vocabulary and binary files; each step has a log of its own."""
    logs = folder / "logs"
    splits, pieces = folder / "text", folder / "pieces"
    if not (splits / _MANIFEST).is_file():
        check_text(text)
        module = "data_prep.python_docs" if text.source else "data_prep.text_files"
        print("data: text", flush=True)
        words = option_words({"out": splits, "text": None if text.source else list(text.files)})
        run_logged("text", [sys.executable, "-m", module, *words], logs / "text.log")
    print("data: vocabulary and binary files", flush=True)
    encode_splits(splits, pieces, folder / "data", text.vocab_size, logs)
    vocabulary = read_json(pieces / _MANIFEST, {"vocabulary": {"pieces": int}})["vocabulary"]
    if vocabulary["pieces"] < text.vocab_size - 3:  # <unk>, <s> and </s>, which are no pieces of text
        print(f"data: the text is too small for {text.vocab_size:,} pieces: there are {vocabulary['pieces']:,}")


def encode_splits(splits: Path, pieces: Path, data: Path, vocab_size: int, logs: Path) -> None:
    """Learn a SentencePiece vocabulary from train.txt, and make fairseq's binary files of all splits.

    Raises:
        UserError: a step failed.
    """
    step = [*this_program(), "data"]
    learn = {"in": splits / "train.txt", "documents": "line", "out": pieces, "restart": True}
    learn |= {"vocab_size": vocab_size, "pad_multiple": 8}
    run_logged("vocabulary", [*step, "tokenizer", *option_words(learn)], logs / "vocabulary.log")
    encode = {"format": "lines", "in": splits, "tokenizer": pieces, "out": data, "restart": True}
    run_logged("binarize", [*step, "binarize", *option_words(encode)], logs / "binarize.log")


def describe(data: str, subsets: tuple[str, ...]) -> dict[str, Any]:
    """Return what ``data.json`` holds: sizes and checksums of the splits; of those that are scored, the first shard's.

    Raises:
        UserError: a file is missing or damaged.
    """
    folders = [Path(one) for one in data.split(":")]
    dictionary = folders[0] / DICTIONARY
    splits: dict[str, Any] = {}
    train = [folder / "train" for folder in folders]
    splits["train"] = {
        "tokens": sum(num_tokens(prefix) for prefix in train),
        "sha256": hashlib.sha256("".join(map(_checksum, train)).encode()).hexdigest()
        if len(train) > 1
        else _checksum(train[0]),
    }
    tokenizer_file = find_tokenizer([folders[0]])
    tokenizer = Tokenizer(Vocabulary.load(dictionary), tokenizer_file) if tokenizer_file else None
    for subset in subsets:
        stream = read_fairseq_tokens(folders[0] / subset)
        sizes = decoded_sizes(stream, tokenizer) if tokenizer else None
        words = int(sizes.words_N.sum()) if sizes else None
        splits[subset] = {
            "tokens": len(stream.tokens),
            "sha256": _checksum(folders[0] / subset),
            "words": words,
            "words_per_token": words / len(stream.tokens) if words else None,
            "bytes": int(sizes.bytes_N.sum()) if sizes else None,
        }
    return {
        "data": data,
        "dictionary_sha256": hashlib.sha256(dictionary.read_bytes()).hexdigest(),
        "vocab_size": len(Vocabulary.load(dictionary)),
        "splits": splits,
    }


def _checksum(prefix: Path) -> str:
    """Return the SHA-256 of a split's tokens as they lie in the file."""
    path = Path(f"{prefix}.bin")
    try:
        return sha256_of(path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
