"""Read a folder that transformers has saved (:mod:`smlp.hf`) as a checkpoint; needs no transformers."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smlp.checkpoint.content import check_is_ours, config_of, progress_problems
from smlp.checkpoint.export import PREFIXES, new_history, new_state, safetensors_header, stored_tensors
from smlp.checkpoint.lazy import HeldTensor, LazyTensor
from smlp.checkpoint.load import bytes_of, tokenizer_of
from smlp.checkpoint.opened import Checkpoint, fit_problems
from smlp.config import all_settings, lost_settings
from smlp.config.presets import FROM_TASK
from smlp.errors import UserError, one_line
from smlp.files import is_missing, plain_name, read_text, regular_file
from smlp.text.tokenizer_files import DICTIONARY, TOKENIZER_FILES, Vocabulary

CONFIG = "config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
#: the names in ``model_type``, by whether the model is an encoder
MODEL_TYPES = ("smlp", "smlp_encoder")
#: names of settings that transformers has for all models, and ours
ALIASES = {
    "hidden_size": "embed_dim",
    "intermediate_size": "ffn_dim",
    "max_position_embeddings": "max_tokens",
    "num_attention_heads": "num_heads",
}
_CORE = "core."
_FAST_TOKENIZER = "tokenizer.json"


def open_hf_folder(folder: str | Path) -> Checkpoint:
    """Open a folder from transformers as a checkpoint without optimizer, to start training from; tensors are lazy.

    Raises:
        UserError: a file is missing or damaged, or it holds another kind of model.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}")
    path = folder / CONFIG
    options = {ALIASES.get(name, name): value for name, value in _read_json(path).items()}  # the last, as there
    kind = options.get("model_type")
    if kind not in MODEL_TYPES:
        raise UserError(f"{path} is of another kind of model (model_type {kind!r:.40}), not one of smlp's")
    is_encoder = kind == MODEL_TYPES[True]
    weights = _weights(folder)
    if others := sorted(name for name in weights if not name.startswith(_CORE)):
        left_out = one_line(", ".join(others)[:200])
        print(f"smlp: warning: {folder}: left out, as no part of the model: {left_out}", file=sys.stderr)
    model = {
        PREFIXES[is_encoder] + name.removeprefix(_CORE): tensor
        for name, tensor in weights.items()
        if name.startswith(_CORE)
    }
    num_updates = options.get("num_updates") or 0
    cfg = {"model": _training_options(options, is_encoder, path)}
    cfg |= {"task": {"_name": "masked_lm" if is_encoder else "language_modeling", "data": None}}
    state = new_state(cfg, model, [new_history(cfg, num_updates)])
    for problem in progress_problems(state, path):
        raise UserError(problem.replace(": optimizer_history.", ": "))
    try:
        check_is_ours(state, folder)
    except UserError as error:
        raise UserError(str(error).replace(PREFIXES[is_encoder], _CORE)) from None  # the names in the files
    names = (DICTIONARY, *TOKENIZER_FILES)
    files: dict[str, HeldTensor | LazyTensor] = {
        name: bytes_of(regular_file(folder / name)) for name in names if not is_missing(folder / name)
    }
    checkpoint = Checkpoint(folder, state, config_of(state, path), files=files, is_export=True)
    size = options.get("vocab_size", checkpoint.config.vocab_size)
    if size != checkpoint.config.vocab_size:
        raise UserError(f"{path}: vocab_size is {size!r:.40}, but the weights have {checkpoint.config.vocab_size}")
    for problem in fit_problems(checkpoint, reads_weights=True):
        raise UserError(problem.replace(checkpoint.prefix, _CORE))  # the names in the files
    if DICTIONARY in files:
        _check_same_ids(folder, tokenizer_of(checkpoint).vocabulary)
    return checkpoint


def _check_same_ids(folder: Path, vocabulary: Vocabulary) -> None:
    """Refuse a dictionary that gives its symbols other ids than the fast tokenizer beside it.

    The pieces of byte-level BPE are not compared: the dictionary has their numbers as symbols.
    """
    path = folder / _FAST_TOKENIZER
    fast = _read_json(path) if path.is_file() else {}
    model, split = (part if isinstance(part := fast.get(name), dict) else {} for name in ("model", "pre_tokenizer"))
    pieces = model.get("vocab")
    if isinstance(pieces, list):  # unigram: pairs of a piece and its score
        pieces = {
            row[0]: number
            for number, row in enumerate(pieces)
            if isinstance(row, list) and row and isinstance(row[0], str)
        }
    if not isinstance(pieces, dict) or split.get("type") == "ByteLevel":
        return
    for number, symbol in enumerate(vocabulary.symbols):
        if pieces.get(symbol, number) != number:
            raise UserError(
                f"{folder / DICTIONARY} has {symbol!r:.60} as symbol {number}, but in {path} it is {pieces[symbol]}: "
                "one of them belongs to another model"
            )


def _training_options(options: Mapping[str, Any], is_encoder: bool, path: Path) -> dict[str, Any]:
    """Return the model's part of the fairseq configuration that yields these settings."""
    known = all_settings()
    settings = {name: options[name] for name in known if name in options and name not in FROM_TASK}
    for name, value in settings.items():
        if value is None and known[name].default is not None:
            raise UserError(f"{path} is damaged: {name} is null")
    settings |= {name: options[name] for name in lost_settings(options)}  # which are refused by name
    start = options.get("bos_token_id", Vocabulary.eos)
    if start not in (Vocabulary.bos, Vocabulary.eos) or isinstance(start, bool):
        raise UserError(f"{path}: bos_token_id must be {Vocabulary.bos} or {Vocabulary.eos}, got {start!r:.40}")
    if options.get("padding_idx", Vocabulary.pad) != Vocabulary.pad:
        raise UserError(f"{path}: padding_idx must be {Vocabulary.pad}, got {options['padding_idx']!r:.40}")
    num_tokens = options.get("max_tokens")
    if not isinstance(num_tokens, int):
        raise UserError(f"{path} is damaged: max_tokens is {num_tokens!r:.40}, not a whole number")
    add_bos = not is_encoder and start == Vocabulary.bos
    if num_tokens < 1 + add_bos:
        raise UserError(f"{path} is damaged: max_tokens must be at least {1 + add_bos}, got {num_tokens!r:.40}")
    # fairseq knows both types as architectures; a model that was built in transformers has no other name
    own = {"_name": options.get("arch") or MODEL_TYPES[is_encoder], "add_bos_token": add_bos}
    if is_encoder:
        return {**settings, **own, "max_positions": num_tokens}
    return {**settings, **own, "tokens_per_sample": num_tokens - add_bos}


def _weights(folder: Path) -> dict[str, LazyTensor]:
    """Return the tensors of one file, or of several by their index."""
    found: dict[str, Any] | None = None
    if (folder / WEIGHTS).is_file():
        files = {WEIGHTS}
    elif (folder / INDEX).is_file():
        found = _read_json(folder / INDEX).get("weight_map")
        if not isinstance(found, dict) or not found:
            raise UserError(f"{folder / INDEX} is damaged: it has no weight_map")
        files = {plain_name(name, str(folder / INDEX)) for name in found.values()}
    else:
        raise UserError(f"{folder} has neither {WEIGHTS} nor {INDEX}")
    tensors: dict[str, LazyTensor] = {}
    for name in sorted(files):
        if not (folder / name).is_file():
            raise UserError(f"{folder} lacks {name}, which {INDEX} names")
        header, start = safetensors_header(folder / name)
        header.pop("__metadata__", None)
        held = stored_tensors(folder / name, header, start)
        tensors |= held if found is None else {key: value for key, value in held.items() if found.get(key) == name}
    if missing := sorted((found or {}).keys() - tensors.keys()):
        raise UserError(f"{folder / INDEX} is damaged: {found[missing[0]]} lacks {missing[0]}")
    return tensors


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_text(path))
    except FileNotFoundError:
        raise UserError(f"there is no file {path}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({type(error).__name__}: {error})") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a JSON object")
    return content
