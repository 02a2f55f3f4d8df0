"""Write a checkpoint as a folder that transformers reads: ``smlp export CHECKPOINT DIR --hf``."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
from pathlib import Path

import safetensors
from transformers import GenerationConfig

from smlp.checkpoint.lazy import as_bytes
from smlp.checkpoint.load import text_files, tokenizer_of
from smlp.checkpoint.opened import Checkpoint, fit_problems
from smlp.config import flatten
from smlp.errors import UserError
from smlp.files import missing_folders, remove_empty, write_whole
from smlp.hf.card import model_card
from smlp.hf.config import SmlpConfig, SmlpEncoderConfig
from smlp.hf.fast_tokenizer import fast_tokenizer
from smlp.hf.modeling import SmlpForCausalLM, SmlpForMaskedLM
from smlp.inference.generation.continuations import banned_tokens
from smlp.nn.build import without_weights
from smlp.text.tokenizer_files import Vocabulary

#: transformers splits larger weights into several files, by default at this size
MAX_SHARD_SIZE = "5GB"


def write_folder(
    checkpoint: Checkpoint,
    folder: Path,
    dictionary: str | Path | None = None,
    tokenizer: str | Path | None = None,
    max_shard_size: str = MAX_SHARD_SIZE,
) -> list[str]:
    """Write the weights, configurations, tokenizer and model card; all of them, or nothing.

    Experts of a checkpoint in parts are merged. Heads of an encoder for other tasks are left out.

    Args:
        checkpoint: to be written.
        folder: to write to; empty, or not there yet.
        dictionary, tokenizer: their files, if they are not next to the checkpoint.
        max_shard_size: largest size of a file of weights, in transformers' notation.

    Returns:
        The names of the tensors that are left out.

    Raises:
        UserError: the checkpoint does not fit its configuration, there is no dictionary, the tokenizer cannot be a fast
            tokenizer, the size is invalid, or the folder has files.
    """
    if not re.fullmatch(r"(?=.*[1-9])[0-9]{1,6}(\.[0-9]+)?[KMGT]B", max_shard_size.upper()):
        raise UserError(
            f"--max-shard-size takes a number with KB, MB, GB or TB, such as 5GB; got {max_shard_size!r:.40}"
        )
    for problem in fit_problems(checkpoint):
        raise UserError(problem)
    if os.path.lexists(folder) and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not an empty folder: give another one")
    if folder.is_symlink() or folder.resolve() == Path.cwd():
        raise UserError(f"{folder} is a link or the current folder, which a new one cannot replace: give another")
    files = text_files(checkpoint, dictionary, tokenizer)
    symbols = tokenizer_of(checkpoint, dictionary, tokenizer).vocabulary
    new_parents = missing_folders(folder)
    made = folder.parent / f".{folder.name}-{secrets.token_hex(4)}"
    try:
        made.parent.mkdir(parents=True, exist_ok=True)
        made.mkdir(mode=0o700)
        for name, tensor in files.items():
            write_whole(made / name, bytes(as_bytes(tensor.load())))
        config = config_of(checkpoint)
        try:
            fast = fast_tokenizer(made, checkpoint.config.is_bidirectional, config.bos_token_id, config.max_tokens)
        except UserError as error:  # not with the name of a folder that will be gone
            raise UserError(str(error).replace(f"{made}/", "").replace(f" in {made}", "")) from error
        fast.save_pretrained(made)
        model, left_out = _model_of(checkpoint, config)
        if isinstance(model, SmlpForCausalLM):
            model.generation_config = _generation_config(config, symbols)
        model.save_pretrained(made, max_shard_size=max_shard_size)
        (made / "README.md").write_text(model_card(checkpoint, folder.name), encoding="utf-8")
        hidden = _umask()
        made.chmod(0o777 & ~hidden)
        for file in made.iterdir():  # safetensors and tempfile write for this user only
            file.chmod(0o666 & ~hidden)
        if folder.exists():
            made.chmod(stat.S_IMODE(folder.stat().st_mode))  # it may have been made private
            folder.rmdir()
        os.replace(made, folder)
    except BaseException as error:
        shutil.rmtree(made, ignore_errors=True)
        remove_empty(new_parents)
        # tokenizers has no class for its errors
        if isinstance(error, safetensors.SafetensorError) or (type(error) is Exception and "os error" in str(error)):
            raise UserError(f"{folder} cannot be written: {error}") from error
        if isinstance(error, OSError) and (error.filename is None or str(error.filename).startswith(str(made))):
            raise UserError(f"{folder} cannot be written: {error.strerror or error}") from error
        if isinstance(error, UserError):  # not with the name of a folder that is gone
            raise UserError(str(error).replace(str(made), str(folder))) from error
        raise
    return left_out


def config_of(checkpoint: Checkpoint) -> SmlpConfig:
    """Return the configuration of transformers for the model of a checkpoint."""
    add_bos = checkpoint.state["cfg"]["model"].get("add_bos_token")
    is_encoder = checkpoint.config.is_bidirectional
    return (SmlpEncoderConfig if is_encoder else SmlpConfig)(
        **flatten(checkpoint.config),
        arch=checkpoint.arch,
        num_updates=checkpoint.num_updates,
        bos_token_id=Vocabulary.bos if add_bos or is_encoder else Vocabulary.eos,
        eos_token_id=Vocabulary.eos,
        pad_token_id=checkpoint.config.padding_idx,
    )


def _model_of(checkpoint: Checkpoint, config: SmlpConfig) -> tuple[SmlpForCausalLM | SmlpForMaskedLM, list[str]]:
    """Return the model with its weights, and the names of tensors that it has no place for."""
    with without_weights():
        model = (SmlpForMaskedLM if checkpoint.config.is_bidirectional else SmlpForCausalLM)(config)
    weights = {name.removeprefix(checkpoint.prefix): tensor for name, tensor in checkpoint.state["model"].items()}
    own = model.core.state_dict().keys()
    model.core.load_state_dict({name: weights[name].load() for name in own}, assign=True)
    return model, sorted(weights.keys() - own)


def _generation_config(config: SmlpConfig, symbols: Vocabulary) -> GenerationConfig:
    """Return the defaults of ``generate``; as in this package, symbols that stand for no text are never written."""
    return GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
        suppress_tokens=banned_tokens(symbols),
    )


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
