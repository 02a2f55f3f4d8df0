"""Exports: the weights, the configuration, the dictionary and the tokenizer of a model in one file.

docs/checkpoints.md describes both formats, ``NAME.pt`` and ``NAME.safetensors``.
"""

from __future__ import annotations

import hashlib
import json
import struct
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import torch

from smlp.checkpoint.lazy import DTYPES, FileVersion, LazyTensor, StoredTensor, as_bytes
from smlp.checkpoint.torch_file import check_records, check_values, is_verifying, of_transformers, write_torch_file
from smlp.config import ModelConfig, all_settings, flatten
from smlp.config.model import RETIRED_SETTINGS
from smlp.config.presets import FROM_TASK, PRESETS
from smlp.errors import UserError
from smlp.files import is_safetensors
from smlp.text.tokenizer_files import DICTIONARY, TOKENIZER_FILES

FORMAT_KEY = "smlp_export"
FORMAT = 1
#: prefixes of the core's names in the ``model`` of a fairseq checkpoint: of language models, of encoders
PREFIXES = ("decoder.core.", "encoder.core.")
_FILES = "files/"
#: the only names that files in an export may have, because opening an export writes them to the user's folder
_TEXT_FILES = (DICTIONARY, *TOKENIZER_FILES)
_HEADER = struct.Struct("<Q")
_MOST_HEADER = 100_000_000  # bytes, of the library
_NO_DIGEST = "0" * 64
_SAFETENSORS = dict(zip(DTYPES, ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL"), strict=True))
_DTYPES = {name: dtype for dtype, name in _SAFETENSORS.items()}


def export_of(
    state: Mapping[str, Any], config: ModelConfig, num_updates: int, files: Mapping[str, LazyTensor]
) -> dict[str, Any]:
    """Return the content of an export.

    Args:
        state: of a checkpoint, with ``cfg`` and all of ``model``.
        config: of the model.
        num_updates: number of updates done in training.
        files: dictionary and tokenizer, by name.
    """
    settings = flatten(config)
    # The options of a criterion that has no dataclass are a Namespace, which JSON does not know.
    cfg = {name: vars(part) if isinstance(part, Namespace) else part for name, part in state["cfg"].items()}
    # Presets may change, so options that the run left to its architecture are filled in.
    resolved = {name: value for name, value in settings.items() if name not in FROM_TASK}
    return {
        FORMAT_KEY: FORMAT,
        "arch": cfg["model"].get("_name"),
        "settings": settings,
        "num_updates": num_updates,
        "cfg": {**cfg, "model": {**cfg["model"], **resolved}},
        "weights": {name.removeprefix(prefix_of(config)): tensor for name, tensor in state["model"].items()},
        "files": dict(files),
    }


def prefix_of(config: ModelConfig) -> str:
    """Return what the names of a model's tensors begin with in a fairseq checkpoint."""
    return PREFIXES[config.is_bidirectional]


def write_export(file: BinaryIO, export: Mapping[str, Any], as_safetensors: bool) -> None:
    """Write an export piece by piece to a seekable file.

    Raises:
        UserError: a ``.safetensors`` file cannot hold the configuration.
    """
    if not as_safetensors:
        write_torch_file(file, export)
        return
    tensors = {**export["weights"], **{_FILES + name: tensor for name, tensor in export["files"].items()}}
    # Wide types first, so that all tensors are aligned.
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    facts = {key: value for key, value in export.items() if key not in ("weights", "files")}
    table: dict[str, Any] = {}
    end = 0
    for name in names:
        tensor, begin = tensors[name], end
        end += tensor.num_bytes
        table[name] = {"dtype": _SAFETENSORS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}

    try:
        metadata = {"format": "pt", "smlp": json.dumps(facts), "sha256": _NO_DIGEST}
    except (TypeError, ValueError) as error:
        raise UserError(f"a .safetensors file cannot hold the configuration ({error}): write a .pt file") from None
    header = json.dumps({"__metadata__": metadata, **table}).encode()
    header += b" " * (-len(header) % 8)
    if len(header) > _MOST_HEADER:
        raise UserError(f"the configuration takes {len(header):,} bytes, and a .safetensors file has {_MOST_HEADER:,}")
    start = _HEADER.pack(len(header)) + header
    digest = hashlib.sha256(start)
    file.write(start)
    for name in names:
        for piece in tensors[name].pieces():
            file.write(as_bytes(piece))
            digest.update(as_bytes(piece))
    file.seek(0)
    file.write(_with_digest(start, _NO_DIGEST, digest.hexdigest()))


def _with_digest(start: bytes, old: str, new: str) -> bytes:
    """Return the beginning of a safetensors file with its digest replaced."""
    return start.replace(f'"sha256": "{old}"'.encode(), f'"sha256": "{new}"'.encode())


def digest_problem(path: str | Path) -> str | None:
    """Return the message for a safetensors file that has changed since it was written; None for an intact one.

    Raises:
        UserError: the file cannot be read.
    """
    header, begin = safetensors_header(path)
    wanted = str(header.get("__metadata__", {}).get("sha256"))
    with open(path, "rb") as file:
        digest = hashlib.sha256(_with_digest(file.read(begin), wanted, _NO_DIGEST))
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() == wanted:
        return None
    return f"{path} is damaged: its SHA-256 is {digest.hexdigest()}, its header says {wanted}"


def check_sums(path: Path) -> None:
    """Compare a file of either format with its checksums, unless the environment says not to.

    Raises:
        UserError: the file has changed since it was written.
    """
    if not is_safetensors(path):
        check_records(path)
    elif is_verifying() and (problem := digest_problem(path)):
        raise UserError(problem)


def is_export(content: Any) -> bool:
    """Return whether the content of a file is an export."""
    return isinstance(content, Mapping) and FORMAT_KEY in content


def read_export(content: Mapping[str, Any], path: str | Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the state of a checkpoint without optimizer, the files and the settings, from the content of an export.

    Raises:
        UserError: it was written by a newer version, is damaged, has an unknown setting or two values of one, or holds
            other files than dictionary and tokenizer.
    """
    if content[FORMAT_KEY] != FORMAT:
        raise UserError(f"{path} is an export in format {content[FORMAT_KEY]}, this version reads {FORMAT}")
    try:
        cfg, settings = content["cfg"], content["settings"]
        other = {name: cfg["model"][name] for name in settings if name not in FROM_TASK}
        history = new_history(cfg, content["num_updates"])
        prefix = PREFIXES[settings.get("direction") == "bidirectional"]
        model = {prefix + name: tensor for name, tensor in content["weights"].items()}
        files = dict(content["files"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path} is a damaged export ({type(error).__name__}: {error})") from error
    known = {*all_settings(), *RETIRED_SETTINGS}
    for name, value in other.items():
        if name not in known:
            whose = "it is of a newer version, or of a router or block that is not registered here"
            raise UserError(f"{path} has an unknown setting {name!r}: {whose}{PRESETS.hint}")
        if value != settings[name]:
            raise UserError(
                f"{path} is a damaged export: {name} is {settings[name]!r} in its settings, {value!r} in its cfg"
            )
    for name, tensor in files.items():
        if name not in _TEXT_FILES:
            raise UserError(f"{path} holds the file {name!r}: an export has {', '.join(_TEXT_FILES)} only")
        if not isinstance(tensor, LazyTensor) or tensor.dtype != torch.uint8:
            raise UserError(f"{path} is a damaged export: {name} in it is not a file")
    return new_state(cfg, model, [history]), files, settings


def new_state(cfg: Mapping[str, Any], model: Mapping[str, Any], history: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a fairseq checkpoint to start a run from: at the beginning of the data, without optimizer."""
    return {
        "args": None,
        "cfg": cfg,
        "model": model,
        "criterion": None,
        "optimizer_history": history,
        "task_state": {},
        "extra_state": {
            "train_iterator": {"version": 2, "epoch": 1, "iterations_in_epoch": 0, "shuffle": True},
        },
    }


def new_history(cfg: Mapping[str, Any], num_updates: int) -> dict[str, Any]:
    """Return the entry of ``optimizer_history`` that fairseq needs even if there is no optimizer state."""

    def name_of(group: str) -> str | None:
        held = cfg.get(group) or {}
        return (vars(held) if isinstance(held, Namespace) else held).get("_name")

    return {
        "criterion_name": name_of("criterion"),
        "optimizer_name": name_of("optimizer"),
        "lr_scheduler_state": {},
        "num_updates": num_updates,
    }


def read_safetensors(path: str | Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the same as :func:`read_export` from a ``.safetensors`` file, with lazy tensors.

    The library only checks the file, because the mapped pages of all slices that it reads would stay resident.

    Raises:
        UserError: the file is damaged or no export, or the library is missing.
    """
    header, start = safetensors_header(path)
    metadata = header.pop("__metadata__", {})
    if "smlp" not in metadata:
        if (Path(path).parent / "config.json").is_file():
            raise UserError(of_transformers(Path(path).parent))
        raise UserError(f"{path} is not an export of smlp: its metadata have no entry 'smlp'")
    try:
        tensors = stored_tensors(path, header, start)
        content = json.loads(metadata["smlp"])
        check_values(content, path)
        content |= {
            "weights": {name: tensor for name, tensor in tensors.items() if not name.startswith(_FILES)},
            "files": {name.removeprefix(_FILES): t for name, t in tensors.items() if name.startswith(_FILES)},
        }
        return read_export(content, path)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} is a damaged export ({type(error).__name__}: {error})") from error


def stored_tensors(path: str | Path, header: Mapping[str, Any], start: int) -> dict[str, StoredTensor]:
    """Return the lazy tensors of a ``.safetensors`` file by name, from its header without the metadata.

    Raises:
        UserError: a tensor is of a type that weights of this package do not have.
    """
    version = FileVersion.of(path)
    for name, entry in header.items():
        if entry["dtype"] not in _DTYPES:
            raise UserError(f"{path}: {name!r:.99} is of type {entry['dtype']}, not one of {', '.join(_DTYPES)}")
    return {
        name: StoredTensor(version, start + entry["data_offsets"][0], _DTYPES[entry["dtype"]], tuple(entry["shape"]))
        for name, entry in header.items()
    }


def safetensors_header(path: str | Path) -> tuple[dict[str, Any], int]:
    """Return the header of a ``.safetensors`` file and the offset at which the tensors begin.

    Raises:
        UserError: the file is damaged, or the library, which checks it, is missing.
    """
    safetensors = safetensors_library()
    try:
        with safetensors.safe_open(path, "pt"):
            pass
    except (safetensors.SafetensorError, OSError) as error:
        size = Path(path).stat().st_size
        raise UserError(f"{path} ({size:,} bytes) is truncated or not a safetensors file ({error})") from error
    with open(path, "rb") as file:
        (length,) = _HEADER.unpack(file.read(_HEADER.size))
        return json.loads(file.read(length)), _HEADER.size + length


def safetensors_library() -> ModuleType:
    """Return the package ``safetensors``.

    Raises:
        UserError: it is not installed.
    """
    try:
        import safetensors
    except ImportError:
        raise UserError("a .safetensors file needs the package safetensors: pip install -e '.[export]'") from None
    return safetensors
