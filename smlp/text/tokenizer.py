"""Text to ids and back: a fairseq dictionary, with a SentencePiece model or byte-level BPE where there is one."""

from __future__ import annotations

import codecs
import operator
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from smlp.errors import UserError
from smlp.text.tokenizer_files import DICTIONARY, find_tokenizer
from smlp.text.tokenizer_kinds import kind_of
from smlp.text.vocabulary import Vocabulary

#: what a line break becomes: ``</s>``, or a space
NEWLINES = ("eos", "space")


class Tokenizer:
    """Encodes text to ids and decodes ids to text.

    Without a model, text is split at spaces, as ``fairseq-preprocess`` does.

    Args:
        vocabulary: of the model.
        model: path of what cut the training text: a SentencePiece model, or ``encoder.json`` with ``vocab.bpe`` beside
            it (GPT-2's byte-level BPE, whose ids are the dictionary's symbols); None for words.

    Raises:
        UserError: a file is missing or damaged, or none is given although the dictionary's symbols are pieces.
    """

    def __init__(self, vocabulary: Vocabulary, model: str | Path | None = None) -> None:
        self.vocabulary = vocabulary
        self._kind = kind_of(vocabulary, model)

    @property
    def strips_lines(self) -> bool:
        """Whether decoded lines have no space at their ends; otherwise decoding gives back what was encoded."""
        return self._kind.strips_lines

    def encode(self, text: str) -> list[int]:
        """Ids of the text's pieces, with no end symbol added; pieces the dictionary lacks become ``<unk>``.

        Raises:
            UserError: it is no text, or has a lone surrogate, which no encoding of text has bytes for.
        """
        check_characters(text)
        return self._kind.encode(text)

    def encode_batch(self, lines: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """:meth:`encode` of many lines: ids one after the other, (N,) int64, and how many are of each, (L,) int64."""
        for line in lines:
            check_characters(line)
        return self._kind.encode_batch(lines)

    def encode_lines(self, text: str, newline: str = "eos") -> list[int]:
        """Ids of a text of any number of lines, with no symbol at either end.

        Args:
            text: any.
            newline: what a line break becomes, ``"eos"`` (``</s>``, the end of a line in training) or ``"space"``.

        Raises:
            UserError: as :meth:`encode`, or ``newline`` is something else.
        """
        check_characters(text)
        if newline not in NEWLINES:
            raise UserError(f"newline must be one of {', '.join(NEWLINES)}, got {newline!r:.80}")
        if newline == "space":
            return self.encode(text.replace("\n", " "))
        ids: list[int] = []
        for number, line in enumerate(text.split("\n")):
            if number:
                ids.append(self.vocabulary.eos)
            ids += self.encode(line)
        return ids

    def content(self, token: int) -> bytes:
        """The bytes of text of one token as it continues a line; those of a character may lie in several tokens."""
        if token == self.vocabulary.eos:
            return b"\n"
        return self._kind.content(self.vocabulary.symbols[token])

    def decoder(self, before: int) -> TextDecoder:
        """For the tokens after one that is known, one by one."""
        return TextDecoder(self, before)

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of the ids; ``</s>`` ends a line.

        Raises:
            UserError: one is no id of the dictionary.
        """
        text = b"".join(self.content(self._checked(token)) for token in tokens).decode("utf-8", "replace")
        return "\n".join(line.strip() for line in text.split("\n")) if self.strips_lines else text

    def _checked(self, token: Any) -> int:
        most = len(self.vocabulary) - 1
        try:
            number = operator.index(token)
        except TypeError:
            number = -1
        if not 0 <= number <= most:
            raise UserError(f"ids must be whole numbers from 0 to {most}, got {token!r:.80}")
        return number


def check_characters(text: str) -> None:
    """Refuses what is no text, and a text with half a character: from bytes that are not UTF-8, or an escape in JSON.

    Raises:
        UserError: the message has the value, or the place.
    """
    if not isinstance(text, str):
        raise UserError(f"a text must be a string, got {text!r:.80}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"the text {_around(text, error.start)!r} has a lone surrogate, U+{ord(text[error.start]):04X}, at "
            f"character {error.start}: it is not Unicode text"
        ) from None


def _around(text: str, place: int, length: int = 20) -> str:
    return text[max(place - length, 0) : place + length]


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer of a folder with ``dict.txt`` and, if there is one, a SentencePiece model or byte-level BPE.

    Raises:
        UserError: the dictionary is missing, or a file is damaged.
    """
    return Tokenizer(Vocabulary.load(Path(folder) / DICTIONARY), find_tokenizer([Path(folder)]))


class TextDecoder:
    """Text of tokens as they come, in whole characters; no space that a piece brings with it begins a line.

    Args:
        tokenizer: of the model.
        before: the token that they follow.
    """

    def __init__(self, tokenizer: Tokenizer, before: int) -> None:
        self._tokenizer, self._before = tokenizer, before
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """What the next token adds to the text."""
        content = self._tokenizer.content(token)
        begins_line = self._before in (Vocabulary.eos, Vocabulary.bos)
        if begins_line and self._tokenizer.strips_lines:
            content = content.removeprefix(b" ")
        self._before = token
        return self._characters.decode(content)

    def rest(self) -> str:
        """What is left at the end of the text: a replacement character for one that is not complete."""
        text = self._characters.decode(b"", final=True)
        self._characters.reset()
        return text
