"""Refuse missing, empty and unreadable text, dictionaries and binarised data in one sentence that says what to do."""

from __future__ import annotations

import codecs
import contextlib
import copy
import itertools
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from smlp.errors import UserError
from smlp.fairseq_compat.replacing import replacing
from smlp.files import regular_file
from smlp.text.binarized import (
    MAGIC,
    OLDER_MAGIC,
    check_older,
    check_recorded,
    check_recorded_file,
    open_data_file,
    open_tokens,
)
from smlp.text.tokenizer_files import SPECIAL_SYMBOLS, Vocabulary, check_mark

#: bytes up to which a .bin file is read whole before training: 500 million tokens of two bytes take 0.1 s for their ids
#: and 1 s for their SHA-256 once they are read. Larger files are checked batch by batch.
READ_AT_START = 1 << 30
_OVERWRITE = " #fairseq:overwrite"
_COMPARED, _PIECE = 64, 4096  # pieces of a file, and their bytes, by which ranks compare their text
_MOST_DIGITS = 18  # of a count, which numpy stores in 64 bits


def apply() -> None:
    from fairseq import utils
    from fairseq.binarizer import FileBinarizer
    from fairseq.data import Dictionary, indexed_dataset
    from fairseq.sequence_scorer import SequenceScorer
    from fairseq.tasks.language_modeling import LanguageModelingTask
    from fairseq.tasks.masked_lm import MaskedLMTask

    @replacing(indexed_dataset, "infer_dataset_impl")
    def infer_dataset_impl(infer: Any, path: str) -> str | None:
        # fairseq takes any file or folder that is called as the split for its text, and leaves the binarised data
        if not indexed_dataset.IndexedDataset.exists(path):
            return infer(path)
        with open(indexed_dataset.index_file_path(path), "rb") as file:
            beginning = file.read(len(MAGIC))
        if beginning.startswith(OLDER_MAGIC):
            return "lazy"  # of "cached", fairseq reads sequences before they are in its cache
        return "mmap" if beginning == MAGIC else infer(path)

    @replacing(indexed_dataset.IndexedDataset, "__getitem__")
    def item_of_older_format(get_item: Any, self: Any, number: int) -> Any:
        # A file that was opened before a fork has one position for all processes, which would read each other's tokens.
        if getattr(self, "opened_by", None) not in (None, os.getpid()):
            self.data_file = None
        self.opened_by = os.getpid()
        return get_item(self, number)

    @replacing(LanguageModelingTask, "setup_dictionary")
    def checked_setup_dictionary(setup_dictionary: Any, cls: type, args: Any, **kw: Any) -> Any:
        if args.data:
            check_folders(utils.split_paths(args.data))
        return setup_dictionary(cls, args, **kw)

    @replacing(LanguageModelingTask, "load_dataset")
    def checked_load_dataset(
        load_dataset: Any, self: Any, split: str, epoch: int = 1, combine: bool = False, **kw: Any
    ) -> Any:
        shards = utils.split_paths(self.args.data)
        directory, wanted = shards[(epoch - 1) % len(shards)], self.args.dataset_impl
        if wanted in (None, "mmap", "lazy", "cached"):  # the others are read in other ways
            for name in subsets(directory, split) if combine else [split]:
                check_split(directory, name, len(self.dictionary))
        check_format(str(Path(directory) / split), wanted)
        self.texts = {**getattr(self, "texts", {}), split: text_of(directory, subsets(directory, split))}
        return load_dataset(self, split, epoch=epoch, combine=combine, **kw)

    @replacing(MaskedLMTask, "load_dict")
    def checked_load_dict(load_dict: Any, cls: type, cfg: Any) -> Any:
        check_folders(utils.split_paths(cfg.data))
        return load_dict(cls, cfg)

    @replacing(MaskedLMTask, "_load_dataset_split")
    def checked_load_dataset_split(load_dataset_split: Any, self: Any, split: str, epoch: int, combine: bool) -> Any:
        shards = utils.split_paths(self.cfg.data)
        directory = shards[(epoch - 1) % len(shards)]
        for name in subsets(directory, split) if combine else [split]:
            check_split(directory, name, len(self.dictionary), self.mask_idx)
        self.texts = {**getattr(self, "texts", {}), split: text_of(directory, subsets(directory, split))}
        return load_dataset_split(self, split, epoch, combine)

    @replacing(MaskedLMTask, "load_dataset")
    def load_masked_dataset(load_masked: Any, self: Any, split: str, *rest: Any, **kw: Any) -> Any:
        with held_out_masks(self, split):
            return load_masked(self, split, *rest, **kw)

    @replacing(Dictionary, "add_file_to_dictionary")
    def checked_add_file(add_file: Any, filename: str, *rest: Any, **kw: Any) -> None:
        check_text(filename)
        add_file(filename, *rest, **kw)

    @replacing(FileBinarizer, "multiprocess_dataset")
    def checked_binarize(binarize: Any, cls: type, input_file: str, *rest: Any, **kw: Any) -> Any:
        check_text(input_file)
        return binarize(cls, input_file, *rest, **kw)

    @replacing(SequenceScorer, "generate")
    def checked_score(score: Any, self: Any, models: Any, sample: Any, **kw: Any) -> Any:
        decoder = getattr(models[0], "decoder", None)
        if hasattr(decoder, "dictionary"):
            check_ids(sample, len(decoder.dictionary), on_gpu=True)  # scoring waits for the GPU anyway
        return score(self, models, sample, **kw)


#: seed of the masks of held-out text
MASK_SEED = 1


@contextlib.contextmanager
def held_out_masks(task: Any, split: str) -> Iterator[None]:
    """Let held-out text be masked alike in all runs; fairseq draws its masks by ``--seed``, so that runs with other
    seeds would be validated on other tokens. The trainer names the split that it trains on, ``task.trained_split``."""
    if split == getattr(task, "trained_split", None):
        yield
        return
    given, task.cfg = task.cfg, copy.copy(task.cfg)
    task.cfg.seed = MASK_SEED
    try:
        yield
    finally:
        task.cfg = given


def how_to_make(directory: str | Path) -> str:
    """Return the command that makes a data directory, as the end of a sentence."""
    return (
        "make it with fairseq-preprocess --only-source --trainpref TRAIN.txt --validpref VALID.txt "
        f"--testpref TEST.txt --destdir {directory}"
    )


def check_folder(directory: str | Path) -> None:
    """Raise ``UserError`` if a data directory is missing, or its files cannot be listed and opened."""
    try:
        if not str(directory):
            raise UserError("one of the data directories has no name: there is an extra colon in the list")
        if not Path(directory).is_dir():
            raise UserError(f"there is no data directory {directory}; {how_to_make(directory)}")
        (Path(directory) / "dict.txt").exists()
        os.listdir(directory)
    except OSError as error:
        raise UserError(f"the data directory {directory} cannot be read: {error.strerror}") from error


def check_folders(directories: Sequence[str | Path]) -> None:
    """Check the data directories of a run, all of whose ids stand for symbols of the first one's dictionary.

    Raises:
        UserError: as :func:`check_folder` and :func:`check_dictionary`, or another directory has a dictionary that
            gives an id to another symbol.
    """
    for directory in directories:
        check_folder(directory)
    check_dictionary(directories[0])
    ours = Path(directories[0]) / "dict.txt"
    for theirs in (Path(directory) / "dict.txt" for directory in directories[1:]):
        if not theirs.is_file() or regular_file(theirs).read_bytes() == ours.read_bytes():
            continue
        pairs = zip(Vocabulary.load(ours).symbols, Vocabulary.load(theirs).symbols, strict=False)
        other = next(((place, *pair) for place, pair in enumerate(pairs) if pair[0] != pair[1]), None)
        if other is not None:
            raise UserError(
                f"{theirs} differs from {ours} from line {other[0] - len(SPECIAL_SYMBOLS) + 1} on ({other[2]!r} there, "
                f"{other[1]!r} here): binarise all data with one dictionary"
            )


def check_dictionary(directory: str | Path) -> None:
    """Raise ``UserError`` if a data directory or its ``dict.txt`` is missing or unreadable, or the latter is empty,
    malformed, not what its manifest says, or has a symbol twice."""
    check_folder(directory)
    path = Path(directory) / "dict.txt"
    if not path.exists():
        raise UserError(f"the data directory {directory} has no dict.txt; {how_to_make(directory)}")
    check_text(path)
    lines_of = dict.fromkeys(("<s>", "<pad>", "</s>", "<unk>"), "the symbols that fairseq adds")
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            # "SYMBOL COUNT", optionally with fairseq's flag
            entry = line.rstrip().removesuffix(_OVERWRITE)
            symbol, _, count = entry.rpartition(" ")
            if number == 1:
                check_mark(path, symbol)
            if not (count.isascii() and count.isdigit()) or len(count) > _MOST_DIGITS or " " not in entry:
                raise UserError(f"{path}, line {number}: expected 'SYMBOL COUNT', found {line.rstrip()[:40]!r}")
            if symbol in lines_of and not line.rstrip().endswith(_OVERWRITE):
                raise UserError(f"{path}, line {number}: the symbol {symbol!r} occurs already in {lines_of[symbol]}")
            lines_of[symbol] = f"line {number}"
    check_recorded_file(path)


def check_split(
    directory: str | Path, split: str, vocab_size: int | None = None, mask: int | None = None
) -> int | None:
    """Check one split of a binarised data set, as :mod:`smlp.text.binarized` does wherever tokens are read.

    Args:
        directory: the data directory.
        split: ``train``, ``valid``, ...; the files are ``SPLIT.idx`` and ``SPLIT.bin``.
        vocab_size: of the dictionary; if given, what the files hold is checked too, up to :data:`READ_AT_START` bytes.
        mask: id of ``<mask>``, which data to be masked do not hold.

    Returns:
        The number of tokens, or None for a format other than fairseq's default one (mmap).

    Raises:
        UserError: a file is missing, unreadable, damaged or not what its manifest says, there is not a single token, or
            one is not in the dictionary.
    """
    prefix, remedy = Path(directory) / split, how_to_make(directory)
    check_folder(directory)
    for path in (Path(f"{prefix}.idx"), Path(f"{prefix}.bin")):
        if not path.exists():
            present = sorted(file.stem for file in Path(directory).glob("*.idx"))
            splits = f"it holds the splits {', '.join(present)}" if present else "it holds no split at all"
            raise UserError(
                f"the data directory {directory} has no {path.name} (each split needs a .bin and an .idx file; "
                f"{splits}); {remedy}"
            )
    with open_data_file(Path(f"{prefix}.idx")) as file:
        start = file.read(len(MAGIC))
    try:
        if start.startswith(OLDER_MAGIC.rstrip(b"\0")):  # ids are checked batch by batch instead
            check_older(prefix)
            return None
        files = open_tokens(prefix)
        if vocab_size is not None:
            check_recorded(prefix, READ_AT_START)
            if files.num_bytes <= READ_AT_START:
                for piece in files.pieces(vocab_size):
                    if mask is not None and (piece == mask).any():
                        raise UserError(f"{prefix}.bin holds the id {mask}, which is <mask> in this dictionary")
    except UserError as error:
        if isinstance(error.__cause__, OSError):  # for example, permission denied
            raise
        raise UserError(f"{error}; {remedy}") from error
    return files.num_tokens


def subsets(directory: str | Path, split: str) -> list[str]:
    """Return the splits that fairseq reads as one: SPLIT, SPLIT1, SPLIT2, ... up to the first that is missing."""
    names = (f"{split}{number}" for number in itertools.count(1))
    return [split, *itertools.takewhile(lambda name: (Path(directory) / f"{name}.idx").exists(), names)]


def check_format(prefix: str, wanted: str | None) -> None:
    """Refuse a ``--dataset-impl`` that is not the data's format; without the option, fairseq detects the format.

    Raises:
        UserError: the message names both formats.
    """
    from fairseq.data.indexed_dataset import IndexedRawTextDataset, infer_dataset_impl

    if wanted is None or (found := infer_dataset_impl(prefix)) == wanted:
        return
    if wanted == "raw" and IndexedRawTextDataset.exists(prefix):  # beside binarised data
        return
    are = f"are {'read as' if found == 'lazy' else 'in the format'} {found!r}" if found else "are missing"
    raise UserError(f"--dataset-impl {wanted}: the data {prefix} {are}; leave --dataset-impl out")


def check_ids(sample: Any, vocab_size: int, on_gpu: bool = False) -> None:
    """Refuse a batch with ids that are not in the dictionary, before the model looks them up.

    Args:
        sample: the batch, or nothing.
        vocab_size: of the dictionary.
        on_gpu: whether a batch on a GPU is looked at too, which waits for it.

    Raises:
        UserError: it has some; an embedding would fail, on a GPU without saying where.
    """
    for tokens in (sample["net_input"]["src_tokens"], sample.get("target")) if sample else ():
        if tokens is None or (tokens.is_cuda and not on_gpu) or not tokens.numel():
            continue
        smallest, largest = (int(value) for value in tokens.aminmax())
        if smallest < 0 or largest >= vocab_size:
            wrong = smallest if smallest < 0 else largest
            raise UserError(f"a batch of the data holds the id {wrong}, but the dictionary has {vocab_size} symbols")


def check_text(path: str | Path) -> None:
    """Raise ``UserError`` if a text file is missing, unreadable, empty or not UTF-8 (naming the line and byte)."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset, lines = 0, 1
    with open_data_file(Path(path), "text file") as file:
        while True:
            chunk = file.read(1 << 20)
            pending = len(decoder.getstate()[0])
            try:
                decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                bad = error.object[error.start]
                position = offset - pending + error.start
                line = lines + error.object[: error.start].count(b"\n")
                raise UserError(
                    f"{path} is not UTF-8 text: byte 0x{bad:02x} at position {position:,} (line {line:,})"
                ) from error
            if not chunk:
                return
            offset += len(chunk)
            lines += chunk.count(b"\n")


def text_of(directory: str | Path, names: Sequence[str]) -> tuple[int, int]:
    """Return the bytes of binarised splits, and a checksum of their lengths and of pieces of their tokens.

    The files are read as such: a dataset in the older format would stay open, and be shared by processes that read it.
    """
    size = found = 0
    is_binarized = any((Path(directory) / f"{name}.bin").exists() for name in names)
    endings = (".idx", ".bin") if is_binarized else ("",)
    for path in (Path(directory) / f"{name}{ending}" for name in names for ending in endings):
        with contextlib.suppress(OSError), open(path, "rb") as file:  # what is missing is named elsewhere
            num_bytes = os.fstat(file.fileno()).st_size
            size += num_bytes
            for start in range(0, num_bytes, max(_PIECE, num_bytes // _COMPARED)):
                file.seek(start)
                found = zlib.crc32(file.read(_PIECE), found)
    return size, found


def check_same_text(own: tuple[int, int], split: str) -> None:
    """Refuse ranks that do not read the same text, of which each takes its part. A collective.

    Args:
        own: what :func:`text_of` returned on this rank.
        split: its name, for the message.

    Raises:
        UserError: it is another one.
    """
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    for rank, (size, content) in enumerate(found):
        if (size, content) != found[0]:
            what = f"{size:,} bytes where rank 0 has {found[0][0]:,}" if size != found[0][0] else "other tokens"
            raise UserError(f"rank {rank} reads another text than rank 0 as {split}: it has {what}; compare their DATA")
