"""Text to ids and back: a fairseq dictionary, with a SentencePiece model where there is one.

A fairseq dictionary file has one ``symbol count`` pair a line; the four special symbols come before its first line.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from smlp.errors import UserError

SPECIAL_SYMBOLS = ("<s>", "<pad>", "</s>", "<unk>")
WORD_START = "\u2581"


class Vocabulary:
    """Symbols and their ids, as in fairseq's ``dict.txt``."""

    bos, pad, eos, unk = range(4)

    def __init__(self, symbols: Iterable[str]) -> None:
        self.symbols = [*SPECIAL_SYMBOLS, *symbols]
        self.index = {symbol: position for position, symbol in enumerate(self.symbols)}

    def __len__(self) -> int:
        return len(self.symbols)

    @classmethod
    def load(cls, path: str | Path) -> Vocabulary:
        """Reads a ``dict.txt``.

        Raises:
            UserError: the file is missing, is not UTF-8, or a line is not a symbol and a count.
        """
        try:
            # not splitlines(): a symbol may be one of Unicode's other line ends
            lines = Path(path).read_text(encoding="utf-8").removesuffix("\n").split("\n")
        except FileNotFoundError:
            raise UserError(f"there is no dictionary file {path}") from None
        except UnicodeDecodeError as error:
            raise UserError(f"dictionary {path} is not UTF-8 at byte {error.start}") from None
        symbols = []
        for number, line in enumerate(lines, start=1):
            fields = line.removesuffix(" #fairseq:overwrite").rsplit(" ", 1)
            if len(fields) != 2 or not fields[1].isdigit():
                raise UserError(f"dictionary {path}, line {number}: expected 'symbol count', got {line!r}")
            symbols.append(fields[0])
        return cls(symbols)


class Tokenizer:
    """Encodes text to ids and decodes ids to text.

    Without a SentencePiece model, text is split at spaces, as ``fairseq-preprocess`` does.

    Args:
        vocabulary: of the model.
        sentencepiece_model: path of the SentencePiece model that cut the training text, or None.

    Raises:
        UserError: the model is missing or is none, or it is not given and the dictionary's symbols are pieces.
    """

    def __init__(self, vocabulary: Vocabulary, sentencepiece_model: str | Path | None = None) -> None:
        self.vocabulary = vocabulary
        self._pieces = None
        if sentencepiece_model is None:
            if any(symbol.startswith(WORD_START) for symbol in vocabulary.symbols):
                raise UserError(
                    "the dictionary holds SentencePiece pieces but there is no sentencepiece.model beside it, beside "
                    "the checkpoint or with the data: name it with --sentencepiece-model"
                )
        else:
            import sentencepiece

            if not Path(sentencepiece_model).is_file():
                raise UserError(f"there is no SentencePiece model {sentencepiece_model}")
            try:
                self._pieces = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_model))
            except (RuntimeError, OSError) as error:
                raise UserError(f"{sentencepiece_model} is not a SentencePiece model ({error})") from None

    def encode(self, text: str) -> list[int]:
        """Ids of the text's pieces, with no end symbol added; pieces the dictionary lacks become ``<unk>``."""
        pieces = self._pieces.encode(text, out_type=str) if self._pieces is not None else text.split()
        return [self.vocabulary.index.get(piece, self.vocabulary.unk) for piece in pieces]

    def encode_lines(self, text: str, newline: str = "eos") -> list[int]:
        """Ids of a text of any number of lines, with no symbol at either end.

        Args:
            text: any.
            newline: what a line break becomes, ``"eos"`` (``</s>``, the end of a line in training) or ``"space"``.
        """
        if newline == "space":
            return self.encode(text.replace("\n", " "))
        ids: list[int] = []
        for number, line in enumerate(text.split("\n")):
            if number:
                ids.append(self.vocabulary.eos)
            ids += self.encode(line)
        return ids

    def piece(self, token: int) -> str:
        """The text of one token as it continues a line: SentencePiece's word mark becomes a space."""
        if token == self.vocabulary.eos:
            return "\n"
        symbol = self.vocabulary.symbols[token]
        return symbol.replace(WORD_START, " ") if self._pieces is not None else f" {symbol}"

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of the ids; ``</s>`` ends a line."""
        text = "".join(self.piece(token) for token in tokens)
        return "\n".join(line.strip() for line in text.split("\n"))
