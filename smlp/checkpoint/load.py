"""Load checkpoints of ``fairseq-train`` as plain PyTorch models, with dictionary and tokenizer; needs no fairseq.

The dictionary and the tokenizer are next to the checkpoint, with its data, or inside an export.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from smlp.checkpoint.export import check_sums
from smlp.checkpoint.lazy import HeldTensor, LazyTensor, as_bytes, row_range
from smlp.checkpoint.opened import Checkpoint, fit_problems, open_checkpoint
from smlp.config import LEAKY_WARNING, ModelConfig
from smlp.errors import UserError
from smlp.files import check_path, regular_file, write_whole
from smlp.inference.language_model import LanguageModel
from smlp.inference.masked import MaskedLanguageModel
from smlp.moe.experts import expert_parameters
from smlp.nn.build import model_of, without_weights
from smlp.nn.encoder import Encoder, add_heads
from smlp.parallel import Ranks
from smlp.text.tokenizer import Tokenizer, Vocabulary
from smlp.text.tokenizer_files import DICTIONARY, SENTENCES, files_of, find_tokenizer, record_in, record_of

_MOST_FOLDERS = 100  # of a training's data; each has the same dictionary


def _folders(path: Path, state: Mapping[str, Any]) -> list[Path]:
    """Return the folders that may have a checkpoint's dictionary: its own, and those of the training data.

    Data of sentence_prediction have it in a folder for the first sentences.
    """
    cfg = state.get("cfg") if isinstance(state, Mapping) else None
    task = cfg.get("task") if isinstance(cfg, Mapping) else None
    data = task.get("data") if isinstance(task, Mapping) else getattr(task, "data", None)
    folders = [Path(folder) for folder in str(data or "").split(":", _MOST_FOLDERS)[:_MOST_FOLDERS] if folder]
    return [path.parent, *(place for folder in folders for place in (folder, folder / SENTENCES))]


def dictionary_of(path: Path, state: Mapping[str, Any]) -> Path | None:
    """Return the dictionary beside a checkpoint, or else the one in the data that it was trained on, if there is one.

    Data that may not be looked at, such as those of somebody else's checkpoint, are passed over.

    Args:
        path: of the checkpoint.
        state: its content.
    """
    return next((found for place in _folders(path, state) if os.path.isfile(found := place / DICTIONARY)), None)


def dictionary_record(checkpoint: Checkpoint) -> Mapping[str, Any] | None:
    """Return the record of the dictionary that a checkpoint was trained with; None if nothing says which it was.

    A checkpoint without a record is taken to be trained with the dictionary inside it, beside it or in its data.

    Raises:
        UserError: the dictionary cannot be read.
    """
    if (record := record_in(checkpoint.state)) is not None:
        return record
    if checkpoint.is_export:
        return record_of(tokenizer_of(checkpoint).vocabulary.symbols) if DICTIONARY in checkpoint.files else None
    if (found := dictionary_of(checkpoint.path, checkpoint.state)) is None:
        return None
    vocabulary = Vocabulary.load(found)
    symbols = (vocabulary.with_mask() if checkpoint.config.is_bidirectional else vocabulary).symbols
    return record_of(symbols) if len(symbols) == checkpoint.config.vocab_size else None  # that of another model


def _find_files(
    checkpoint: Checkpoint, dictionary: str | Path | None, tokenizer: str | Path | None
) -> tuple[Path, Path | None]:
    """Return the dictionary and, if there is one, the tokenizer of a checkpoint.

    They are looked for next to the checkpoint, then in the data directories that it was trained on; the tokenizer first
    next to the dictionary. The arguments name other files.
    """
    folders = _folders(checkpoint.path, checkpoint.state)
    dictionary = dictionary or dictionary_of(checkpoint.path, checkpoint.state)
    if dictionary is None:
        places = f"beside {checkpoint.path}" + "".join(f" or in {folder}" for folder in folders[1:])
        raise UserError(f"no {DICTIONARY} {places}: name it with --dict")
    tokenizer = tokenizer or find_tokenizer([Path(dictionary).parent, *folders])
    return Path(dictionary), tokenizer and Path(tokenizer)


def tokenizer_of(
    checkpoint: Checkpoint, dictionary: str | Path | None = None, tokenizer: str | Path | None = None
) -> Tokenizer:
    """Return the tokenizer of a checkpoint, from the files named, from inside an export or from the files found.

    An export with files of its own takes no others that lie about: where one is named, the other is still its own.

    Raises:
        UserError: there is no dictionary, its size is not the model's, or a file cannot be read.
    """
    if checkpoint.is_export and (checkpoint.files or dictionary is None):
        with tempfile.TemporaryDirectory() as folder:
            for name, tensor in checkpoint.files.items():
                write_whole(Path(folder) / name, _to_bytes(tensor))
            path = Path(dictionary or Path(folder) / DICTIONARY)
            try:
                found = _read(path, tokenizer or find_tokenizer([Path(folder)]), checkpoint)
            except UserError as error:
                if (dictionary or tokenizer) and folder not in str(error):  # it is of a file that the user names
                    raise
                raise UserError(f"in {checkpoint.path}: {str(error).replace(f'{folder}/', '')}") from error
        if dictionary is None:
            return found
    else:
        path, tokenizer = _find_files(checkpoint, dictionary, tokenizer)
        found = _read(path, tokenizer, checkpoint)
    is_its_own = found.vocabulary.is_that_of(checkpoint.state)
    if is_its_own is None and dictionary is not None:
        _check_dictionary(path, found.vocabulary, checkpoint)
    if is_its_own is False:
        found_alone = "put that one beside the checkpoint, or name it with --dict"
        remedy = found_alone if dictionary is None else "use that one"
        raise UserError(
            f"dictionary {path} has other symbols than the one that {checkpoint.path} was trained with: {remedy}"
        )
    return found


def _check_dictionary(path: Path, vocabulary: Vocabulary, checkpoint: Checkpoint) -> None:
    """Refuse a dictionary of the right size whose symbols are not those of the checkpoint's own, if it has one
    that can be read."""
    own = checkpoint.path if checkpoint.is_export else dictionary_of(checkpoint.path, checkpoint.state)
    if own is None or (own.exists() and own.samefile(path)):
        return
    try:
        held = tokenizer_of(checkpoint).vocabulary if checkpoint.is_export else Vocabulary.load(own)
    except UserError:  # it is damaged, and the user names another one in its place
        return
    if checkpoint.config.is_bidirectional and not checkpoint.is_export:
        held = held.with_mask()
    symbols = zip(vocabulary.symbols, held.symbols, strict=False)
    if len(vocabulary) == len(held) and (differs := next((pair for pair in symbols if pair[0] != pair[1]), None)):
        raise UserError(
            f"dictionary {path} has other symbols than {own}, which the model was trained with: {differs[0]!r} where "
            f"that has {differs[1]!r}"
        )


def _read(dictionary: Path, tokenizer: str | Path | None, checkpoint: Checkpoint) -> Tokenizer:
    vocabulary, num_rows = Vocabulary.load(dictionary), checkpoint.config.vocab_size
    if checkpoint.config.is_bidirectional:
        vocabulary = vocabulary.with_mask()
    if len(vocabulary) != num_rows:
        raise UserError(
            f"dictionary {dictionary} has {len(vocabulary)} symbols but checkpoint {checkpoint.path} was trained with "
            f"{num_rows}"
        )
    return Tokenizer(vocabulary, tokenizer)


def text_files(
    checkpoint: Checkpoint, dictionary: str | Path | None = None, tokenizer: str | Path | None = None
) -> dict[str, LazyTensor]:
    """Return the dictionary and the tokenizer to put into an export, by file name.

    Raises:
        UserError: as :func:`tokenizer_of`.
    """
    tokenizer_of(checkpoint, dictionary, tokenizer)
    files = dict(checkpoint.files)
    if not files:
        dictionary, tokenizer = _find_files(checkpoint, dictionary, tokenizer)
    if dictionary is not None:
        files[DICTIONARY] = bytes_of(dictionary)
    if tokenizer is not None:
        files = {name: content for name, content in files.items() if name == DICTIONARY}
        files |= {name: bytes_of(path) for name, path in files_of(Path(tokenizer)).items()}
    return files


def check_beside(files: Mapping[str, LazyTensor], folder: Path) -> None:
    """Raise if a folder has a dictionary or tokenizer that differs from these files.

    Raises:
        UserError: the message names the file.
    """
    for name, tensor in files.items():
        if (folder / name).exists() and _to_bytes(bytes_of(folder / name)) != _to_bytes(tensor):
            raise UserError(f"{folder / name} differs from the export's: write to another folder")


@contextlib.contextmanager
def written_beside(files: Mapping[str, LazyTensor], target: Path) -> Iterator[None]:
    """Write the files that the folder of a checkpoint lacks, while the block writes the checkpoint.

    If something fails before the checkpoint is there, they are removed again.
    """
    folder, before = target.parent, _identity(target)
    lacking = [name for name in files if not (folder / name).exists()]
    try:
        for name in lacking:
            write_whole(folder / name, _to_bytes(files[name]))
        yield
    except BaseException:
        if _identity(target) in (before, None):  # an interruption may come when all is written
            for name in lacking:
                (folder / name).unlink(missing_ok=True)
        raise


def _identity(path: Path) -> int | None:
    """Return the number of a file on its disk, which one that replaces it does not have; None if there is none."""
    return path.stat().st_ino if path.exists() else None


def bytes_of(path: Path) -> HeldTensor:
    """Return the content of a file, (n,) uint8.

    Raises:
        UserError: it is no regular file, or cannot be read.
    """
    try:
        data = bytearray(regular_file(path).read_bytes())
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    return HeldTensor(torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8))


def _to_bytes(tensor: LazyTensor) -> bytes:
    return bytes(as_bytes(tensor.load()))


def load_pretrained(
    path: str | Path,
    dictionary: str | Path | None = None,
    tokenizer: str | Path | None = None,
    mapped: bool = False,
    ranks_for: Callable[[ModelConfig], Ranks] | None = None,
) -> LanguageModel | MaskedLanguageModel:
    """Load a model from a checkpoint of ``fairseq-train --user-dir smlp``, in evaluation mode, on the CPU.

    The checkpoint may be in one file, in parts written by several ranks, or an export. An export contains its
    dictionary and tokenizer. For other checkpoints, ``dict.txt`` and ``sentencepiece.model`` (or ``encoder.json`` with
    ``vocab.bpe``) are looked for next to the checkpoint and then in the data directory that it was trained on, the
    tokenizer first next to the dictionary.

    Args:
        path: of the checkpoint.
        dictionary: a ``dict.txt`` to use instead.
        tokenizer: a SentencePiece model or ``encoder.json`` to use instead.
        mapped: whether weights stay in the file and are read as they are used, so that processes share them. The file
            may be replaced meanwhile, but not written to.
        ranks_for: returns which rank holds which experts of a model; only this rank's are kept. By default, one process
            holds all.

    Returns:
        A language model, or, from an encoder's checkpoint, a masked language model.

    Raises:
        UserError: a file is missing or damaged, or the dictionary does not fit the checkpoint.
    """
    for what, file in (("dictionary", dictionary), ("tokenizer", tokenizer)):
        if file is not None:
            check_path(file, what)
    checkpoint = open_checkpoint(path)
    for file in checkpoint.paths:
        check_sums(file)
    text = tokenizer_of(checkpoint, dictionary, tokenizer)
    for problem in fit_problems(checkpoint):
        raise UserError(problem)
    if checkpoint.config.is_leaky:
        warnings.warn(LEAKY_WARNING, stacklevel=2)
    ranks = None if ranks_for is None else ranks_for(checkpoint.config)
    with without_weights():  # no weights are drawn only to be replaced
        model = model_of(checkpoint.config, ranks)
        if isinstance(model, Encoder):
            add_heads(model, checkpoint.state["model"])
    experts = {name for name, _, _ in expert_parameters(model)} if ranks is not None else set()
    weights = {}
    for name, tensor in model.state_dict().items():
        stored = checkpoint.state["model"][checkpoint.prefix + name]
        if ranks is not None and name in experts:
            stored = row_range(stored, ranks.layout.expert_ids)
        weights[name] = (stored.mapped() if mapped else stored.load()).to(tensor.dtype).view(tensor.shape)
    model.load_state_dict(weights, assign=True)
    if isinstance(model, Encoder):
        return MaskedLanguageModel(model, text).eval()
    options = checkpoint.state["cfg"]["model"]
    start_token = Vocabulary.bos if options.get("add_bos_token") else Vocabulary.eos
    return LanguageModel(model, text, start_token).eval()


def load_language_model(
    path: str | Path,
    dictionary: str | Path | None = None,
    tokenizer: str | Path | None = None,
    mapped: bool = False,
    what: str = "this",
    ranks_for: Callable[[ModelConfig], Ranks] | None = None,
) -> LanguageModel:
    """Load a model that predicts next tokens; arguments as of :func:`load_pretrained`.

    Args:
        what: the command or function that needs such a model, for the message.

    Raises:
        UserError: it is an encoder, or cannot be loaded.
    """
    model = load_pretrained(path, dictionary, tokenizer, mapped, ranks_for)
    if isinstance(model, MaskedLanguageModel):
        raise UserError(f"{path} is an encoder, which does not predict next tokens: {what} needs a language model")
    return model
