"""Tokenizers of this package as fast tokenizers of transformers, with the same ids.

In a language model's tokenizer, the token ``</s>`` is named after the line break that it stands for, so that a text of
several lines has the same ids as in this package and a literal ``</s>`` in a text is not a symbol. The only symbols
that a text can contain by accident are padding and, where it begins texts, ``<s>``. A start symbol is put before a text
unless ``add_special_tokens=False``.
"""

from __future__ import annotations

import random
from pathlib import Path

import tokenizers
from sentencepiece import sentencepiece_model_pb2 as proto
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from smlp.errors import UserError
from smlp.text.tokenizer import Tokenizer
from smlp.text.tokenizer_files import (
    DICTIONARY,
    ENCODER_JSON,
    MASK,
    SPECIAL_SYMBOLS,
    Vocabulary,
    find_tokenizer,
    read_byte_level,
)
from smlp.text.tokenizer_kinds import WORD_START

_BOS, _PAD, _EOS, _UNK = SPECIAL_SYMBOLS
_NEWLINE = "\n"
_CHECKED, _MOST_DIFFERENT = 200, 10  # texts compared before a tokenizer is handed out
_NO_SPACE_BEGINS_A_LINE = decoders.Replace("\n ", "\n")
#: white space of str.split(); \s lacks the four separators
_WHITE_SPACE = r"[\s\x1c-\x1f]+"


def fast_tokenizer(folder: Path, is_bidirectional: bool, start_token: int, max_tokens: int) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a folder with ``dict.txt`` and, if there is one, SentencePiece or byte-level BPE.

    Args:
        folder: with the files.
        is_bidirectional: whether it is for an encoder: texts stand between ``<s>`` and ``</s>``, there is ``<mask>``,
            and line breaks are not special.
        start_token: id before every text for a language model.
        max_tokens: T.

    Raises:
        UserError: the files cannot be read, or a fast tokenizer cannot give the same ids.
    """
    vocabulary, model = Vocabulary.load(folder / DICTIONARY), find_tokenizer([folder])
    if is_bidirectional:
        vocabulary = vocabulary.with_mask()
    ours = Tokenizer(vocabulary, model)
    symbols = list(vocabulary.symbols)
    if len(vocabulary.index) < len(symbols):
        raise UserError(f"{folder / DICTIONARY} has {len(symbols) - len(vocabulary.index)} duplicate symbols")
    if is_bidirectional:
        special = {"cls_token": _BOS, "sep_token": _EOS, "pad_token": _PAD, "mask_token": MASK}
        single, pair = f"{_BOS} $A {_EOS}", f"{_BOS} $A {_EOS} $B {_EOS}"
    else:
        symbols[vocabulary.eos] = _NEWLINE
        start = _NEWLINE if start_token == vocabulary.eos else _BOS
        special = {"bos_token": start, "eos_token": _NEWLINE, "pad_token": _PAD}
        single, pair = f"{start} $A", f"{start} $A $B"
    if model is None:
        fast = _words(symbols)
    elif model.name == ENCODER_JSON:
        fast = _byte_level(symbols, vocabulary, model)
    else:
        fast = _sentence_pieces(symbols, set(special.values()), vocabulary, model)
    fast.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in special.values()])
    fast.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=[(name, fast.token_to_id(name)) for name in set(special.values())]
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=fast,
        **special,
        model_max_length=max_tokens,
        padding_side="right" if is_bidirectional else "left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )
    _check_same(made, ours, is_bidirectional, folder)
    return made


def _check_same(fast: PreTrainedTokenizerFast, ours: Tokenizer, is_bidirectional: bool, folder: Path) -> None:
    """Compare the ids of texts that are made of random pieces of the vocabulary.

    A few may differ: random pieces have equally likely splits and marks without letters, which are rare in real text.

    Raises:
        UserError: more than ``_MOST_DIFFERENT`` differ.
    """
    draw, last = random.Random(1), len(ours.vocabulary) - 1
    differ = []
    for _ in range(_CHECKED):
        text = ours.decode([draw.randint(len(SPECIAL_SYMBOLS), last) for _ in range(30)]).replace(MASK, "")
        want = ours.encode(text) if is_bidirectional else ours.encode_lines(text)
        if fast.backend_tokenizer.encode(text, add_special_tokens=False).ids != want:  # no warning of long texts
            differ.append(text)
    if len(differ) > _MOST_DIFFERENT:
        raise UserError(
            f"the tokenizer in {folder} cannot be a fast tokenizer of transformers: it would give {len(differ)} of "
            f"{_CHECKED} texts other ids, such as {differ[0][:60]!r}"
        )


def _ids(symbols: list[str]) -> dict[str, int]:
    return {symbol: number for number, symbol in enumerate(symbols)}


def _words(symbols: list[str]) -> tokenizers.Tokenizer:
    fast = tokenizers.Tokenizer(models.WordLevel(_ids(symbols), unk_token=_UNK))
    fast.pre_tokenizer = pre_tokenizers.Split(Regex(_WHITE_SPACE), "removed")
    space = decoders.Replace(Regex("^(?=.)"), " ")  # before each word; a line break is none
    fast.decoder = decoders.Sequence([space, decoders.Fuse(), _NO_SPACE_BEGINS_A_LINE])
    return fast


def _byte_level(symbols: list[str], vocabulary: Vocabulary, encoder_json: Path) -> tokenizers.Tokenizer:
    """Return a BPE tokenizer; raise UserError if a piece has no symbol in the dictionary, or another symbol's name."""
    ids, merges = read_byte_level(encoder_json)
    _check_complete([str(number) for number in ids.values()], vocabulary, encoder_json)
    pieces = {piece: vocabulary.index[str(number)] for piece, number in ids.items()}
    taken = set(pieces.values())
    others = {name: number for name, number in _ids(symbols).items() if number not in taken}
    if shared := pieces.keys() & others.keys():
        raise UserError(f"{encoder_json} has a piece {min(shared)!r}, which is a symbol of the dictionary already")
    fast = tokenizers.Tokenizer(models.BPE(vocab=pieces | others, merges=merges))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    return fast


def _check_complete(symbols: list[str], vocabulary: Vocabulary, model: Path) -> None:
    lacking = [symbol for symbol in symbols if symbol not in vocabulary.index]
    if lacking:
        raise UserError(
            f"the dictionary lacks {len(lacking)} pieces of {model}, such as {lacking[0]!r}, which become {_UNK}: no "
            "fast tokenizer of transformers does that"
        )


def _sentence_pieces(
    symbols: list[str], special: set[str], vocabulary: Vocabulary, model: Path
) -> tokenizers.Tokenizer:
    """Return the tokenizer of a SentencePiece model; raise UserError if no fast tokenizer can do the same."""
    spec = proto.ModelProto.FromString(model.read_bytes())
    trainer, normalizer, kinds = spec.trainer_spec, spec.normalizer_spec, proto.ModelProto.SentencePiece
    is_bpe = trainer.model_type == proto.TrainerSpec.BPE
    if not is_bpe and trainer.model_type != proto.TrainerSpec.UNIGRAM:
        raise UserError(f"{model} splits into words or characters: only unigram and BPE models become fast tokenizers")
    if trainer.treat_whitespace_as_suffix or any(piece.type == kinds.USER_DEFINED for piece in spec.pieces):
        raise UserError(f"{model} has user-defined symbols or spaces after words, which no fast tokenizer has")
    matched = [piece for piece in spec.pieces if piece.type == kinds.NORMAL]
    _check_complete([piece.piece for piece in matched], vocabulary, model)
    scores = {piece.piece: piece.score for piece in matched}
    has_bytes = trainer.byte_fallback
    if is_bpe:
        bpe = models.BPE(
            vocab=_ids(symbols), merges=_merges(scores), unk_token=_UNK, fuse_unk=True, byte_fallback=has_bytes
        )
        fast = tokenizers.Tokenizer(bpe)
    else:
        # The library matches all its symbols in a text, but never one with a space: spaces are WORD_START by then.
        found = {*special, *scores, *(piece.piece for piece in spec.pieces if piece.type == kinds.BYTE)}
        names = [symbol if symbol in found else f"{symbol} " for symbol in symbols]
        table = [(name, scores.get(name, min(scores.values()))) for name in names]
        fast = tokenizers.Tokenizer(models.Unigram(table, vocabulary.unk, has_bytes))
    steps: list[normalizers.Normalizer] = []
    if normalizer.precompiled_charsmap:
        steps.append(normalizers.Precompiled(normalizer.precompiled_charsmap))
    if normalizer.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(pattern), by) for pattern, by in ((" {2,}", " "), ("^ | $", ""))]
    if normalizer.add_dummy_prefix:  # Metaspace would put none before a space
        steps.append(normalizers.Prepend(" "))
    fast.normalizer = normalizers.Sequence(steps)
    fast.pre_tokenizer = pre_tokenizers.Metaspace(WORD_START, "never", split=False)
    if has_bytes and not is_bpe:  # the letters <0x41> are not the piece of that byte
        apart = pre_tokenizers.Split(Regex("<(?=0x[0-9A-F]{2}>)"), "merged_with_previous")
        fast.pre_tokenizer = pre_tokenizers.Sequence([fast.pre_tokenizer, apart])
    # A space at the very beginning stays: pipelines decode what follows a prompt alone. The spaces of names go.
    no_space_ends_a_name = decoders.Replace(Regex(" $"), "")
    parts = [no_space_ends_a_name, decoders.Replace(WORD_START, " "), decoders.ByteFallback(), decoders.Fuse()]
    fast.decoder = decoders.Sequence([*parts, _NO_SPACE_BEGINS_A_LINE])
    return fast


def _merges(scores: dict[str, float]) -> list[tuple[str, str]]:
    """Return the pairs that make each piece, best piece first: SentencePiece joins the pair whose piece is the best."""
    pairs = []
    for piece in sorted(scores, key=lambda piece: -scores[piece]):
        halves = ((piece[:place], piece[place:]) for place in range(1, len(piece)))
        pairs += [(left, right) for left, right in halves if left in scores and right in scores]
    return pairs
