"""The text that ``smlp eval-lm`` scores, binarised data or a text file, and the model that goes with it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from smlp.cli.options import load_model
from smlp.errors import UserError

if TYPE_CHECKING:
    from smlp.evaluation.report import TextSizes
    from smlp.inference.language_model import LanguageModel
    from smlp.inference.masked import MaskedLanguageModel
    from smlp.launch.team import Team
    from smlp.text.binarized import BinarizedTokens

Model = TypeVar("Model", "LanguageModel", "LanguageModel | MaskedLanguageModel")


@dataclass(frozen=True)
class EvaluationText:
    """A stream of tokens, with the sizes of the text that it was made from, if they are known."""

    name: str
    stream: BinarizedTokens
    original: TextSizes | None
    #: notes on the result
    notes: tuple[str, ...] = ()


def load_model_for(
    args: argparse.Namespace, team: Team, load: Callable[[argparse.Namespace, Team], Model] = load_model
) -> Model:
    """Load the model; its dictionary and tokenizer are looked for beside the checkpoint, then in DATA.

    Args:
        args: of the command.
        team: the ranks that share the work.
        load: loads the model from the checkpoint, the dictionary and the tokenizer of ``args``.

    Raises:
        UserError: a file is missing or damaged, or DATA has a dictionary with other symbols.
    """
    from smlp.checkpoint.opened import open_checkpoint
    from smlp.text.tokenizer import Vocabulary
    from smlp.text.tokenizer_files import DICTIONARY, find_tokenizer

    folder = data_folder(args.data)
    if folder is not None and not open_checkpoint(args.path).is_export:
        beside = Path(args.path).parent
        if args.dict is None and not (beside / DICTIONARY).is_file() and (folder / DICTIONARY).is_file():
            args.dict = str(folder / DICTIONARY)
        if args.tokenizer is None and find_tokenizer([beside]) is None:
            args.tokenizer = find_tokenizer([folder])
    model = load(args, team)
    if folder is not None and (folder / DICTIONARY).is_file():
        vocabulary, ours = Vocabulary.load(folder / DICTIONARY), model.vocabulary.symbols
        theirs = (vocabulary.with_mask() if model.core.config.is_bidirectional else vocabulary).symbols
        if theirs != ours:
            raise UserError(
                f"{folder / DICTIONARY} ({len(theirs)} symbols) is not the dictionary of the model {args.path} "
                f"({len(ours)} symbols): binarise the text with that one"
            )
    return model


def data_folder(data: str | None) -> Path | None:
    """Return the folder that is evaluated: the first of several joined by ":", as in fairseq."""
    return None if data is None else Path(data.split(":")[0])


def read_text(args: argparse.Namespace, model: LanguageModel | MaskedLanguageModel) -> EvaluationText:
    """Read the text that the options name, in the model's tokens.

    Raises:
        UserError: a file is missing or damaged, holds an id that the model does not know, or text and data differ.
    """
    from smlp.evaluation.perplexity import read_lines
    from smlp.evaluation.report import original_sizes, tokens_of
    from smlp.text.binarized import read_fairseq_tokens

    lines = None if args.text is None else read_lines(args.text)
    folder = data_folder(args.data)
    if folder is None:
        if not lines:
            raise UserError(f"text file {args.text} holds no line")
        stream = tokens_of(lines, model.tokenizer)
        return EvaluationText(args.text, stream, original_sizes(lines, stream))
    prefix = folder / args.gen_subset
    stream, vocab_size = read_fairseq_tokens(prefix), len(model.vocabulary)
    lowest, highest = stream.tokens.min(initial=0), stream.tokens.max(initial=0)
    if lowest < 0 or highest >= vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise UserError(f"{prefix}.bin holds the id {wrong}, but the model has {vocab_size} symbols, counted from 0")
    num_folders = len(args.data.split(":"))
    notes = (
        (f"only the first of {num_folders} folders is evaluated, as with fairseq-eval-lm",) if num_folders > 1 else ()
    )
    original = None if lines is None else original_sizes(lines, stream)
    return EvaluationText(str(prefix), stream, original, notes)
