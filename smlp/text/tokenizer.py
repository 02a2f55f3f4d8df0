"""Convert text to ids and back with a fairseq dictionary and, if there is one, SentencePiece or byte-level BPE."""

from __future__ import annotations

import codecs
import operator
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from smlp.errors import UserError
from smlp.text.tokenizer_files import DICTIONARY, Vocabulary, find_tokenizer
from smlp.text.tokenizer_kinds import STRETCH, batches_of_text, kind_of

#: replacement of a line break: ``</s>``, or a space
NEWLINES = ("eos", "space")
_LINE_BREAKS = str.maketrans("\n\r", "  ")


class Tokenizer:
    """Encodes text to ids and decodes ids to text.

    Without a model, text is split at spaces, as ``fairseq-preprocess`` does.

    Args:
        vocabulary: of the model.
        model: path of the model that split the training text: of SentencePiece, or ``encoder.json`` with
            ``vocab.bpe`` next to it (GPT-2's byte-level BPE, whose ids are the dictionary's symbols); None for words.

    Raises:
        UserError: a file is missing or damaged, or none is given although the dictionary's symbols are pieces.
    """

    def __init__(self, vocabulary: Vocabulary, model: str | Path | None = None) -> None:
        self.vocabulary = vocabulary
        self._kind = kind_of(vocabulary, model)

    @property
    def strips_lines(self) -> bool:
        """Return whether decoding strips lines; otherwise it restores exactly the text that was encoded."""
        return self._kind.strips_lines

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text's pieces without an end symbol; unknown pieces become ``<unk>``.

        Raises:
            UserError: it is no string, or has a lone surrogate, which cannot be encoded.
        """
        check_characters(text)
        return self._kind.encode(text)

    def encode_batch(self, lines: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Encode many lines; return all ids joined, (N,) int64, and the number of ids of each line, (L,) int64."""
        for line in lines:
            check_characters(line)
        # in blocks: the libraries make a list for each line, which a document may have millions of
        ids, lengths = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for block in batches_of_text(lines, STRETCH):
            ids_N, lengths_L = self._kind.encode_batch(block)
            ids.append(ids_N)
            lengths.append(lengths_L)
        return np.concatenate(ids), np.concatenate(lengths)

    def encode_with_offsets(self, text: str) -> tuple[list[int], np.ndarray]:
        """Return the ids of a text, and the characters that each comes from: (N, 2) int32.

        Of the characters, the first and the one after the last are given. A line break counts as a space. White space
        around a token is not part of it; each of several tokens that share a character has all of it.

        Raises:
            UserError: as :meth:`encode`.
        """
        check_characters(text)
        ids, offsets = self._kind.encode_with_offsets(text.translate(_LINE_BREAKS))
        for place, (begin, end) in enumerate(offsets):
            begin += len(text[begin:end]) - len(text[begin:end].lstrip())
            offsets[place] = begin, begin + len(text[begin:end].rstrip())
        return ids, np.array(offsets, np.int32).reshape(-1, 2)

    def encode_lines(self, text: str, newline: str = "eos") -> list[int]:
        """Return the ids of a text of any number of lines, with no symbol at either end.

        Args:
            text: to encode.
            newline: what a line break becomes: ``"eos"`` (``</s>``, as in training) or ``"space"``.

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
        """Return the bytes that a token adds to a line; a character's bytes may be spread over several tokens."""
        if token == self.vocabulary.eos:
            return b"\n"
        return self._kind.content(self.vocabulary.symbols[token])

    def decoder(self, before: int) -> TextDecoder:
        """Return a decoder for a stream of tokens that follows the token ``before``."""
        return TextDecoder(self, before)

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of some ids; ``</s>`` ends a line.

        Raises:
            UserError: an id is not in the dictionary.
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
    """Check that a value is a string without lone surrogates, which come from invalid UTF-8 or escapes in JSON.

    Raises:
        UserError: the message gives the value, or the place in the text.
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
    """Return the tokenizer of a folder with ``dict.txt`` and, if there is one, a SentencePiece model or byte-level BPE.

    Raises:
        UserError: the dictionary is missing, or a file is damaged.
    """
    return Tokenizer(Vocabulary.load(Path(folder) / DICTIONARY), find_tokenizer([Path(folder)]))


class TextDecoder:
    """Decode a stream of tokens into whole characters; the space before a line's first piece is dropped.

    Args:
        tokenizer: of the model.
        before: the token before the stream.
    """

    def __init__(self, tokenizer: Tokenizer, before: int) -> None:
        self._tokenizer, self._before = tokenizer, before
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Return the text that the next token completes."""
        content = self._tokenizer.content(token)
        begins_line = self._before in (Vocabulary.eos, Vocabulary.bos)
        if begins_line and self._tokenizer.strips_lines:
            content = content.removeprefix(b" ")
        self._before = token
        return self._characters.decode(content)

    def rest(self) -> str:
        """Return what is left at the end of the stream: a replacement character for an incomplete one."""
        text = self._characters.decode(b"", final=True)
        self._characters.reset()
        return text
