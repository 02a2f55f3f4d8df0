"""Checkpoints for tests, as fairseq-train writes them in one file, made without fairseq."""

from __future__ import annotations

import functools
import io
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import smlp
from smlp.checkpoint.opened import open_checkpoint
from smlp.checkpoint.output import write_in_parts
from smlp.cli.main import main
from smlp.config import flatten
from smlp.config.presets import FROM_TASK
from smlp.nn.decoder import Decoder

PREFIX = "decoder.core."
#: a model of a moment, with experts in one of two blocks
SMALL = {"vocab_size": 24, "max_tokens": 12, "embed_dim": 16, "ffn_dim": 24, "num_heads": 2, "dropout": 0.0}
WORDS = [f"w{number}" for number in range(SMALL["vocab_size"] - 4)]


def small(arch: str, **overrides: Any) -> dict[str, Any]:
    """Settings for a small model of an architecture; the sparse ones get one sparse block of four experts."""
    dense = arch.startswith(("dense_lm", "gmlp_lm")) or "_mlm" in arch
    layers = {"num_dense_layers": 2, "num_sparse_layers": 0} if dense else {"num_dense_layers": 1}
    experts = {} if dense else {"num_sparse_layers": 1, "num_experts": 4}
    return {**SMALL, **layers, **experts, **overrides}


def trained(arch: str, updates: int = 2, seed: int = 0, **overrides: Any) -> tuple[Decoder, torch.optim.Adam]:
    """A model after some updates of Adam on random tokens, and the optimizer."""
    torch.manual_seed(seed)
    decoder = smlp.build(arch, **small(arch, **overrides))
    optimizer = torch.optim.Adam(decoder.parameters(), lr=1e-2)
    for _ in range(updates):
        train_once(decoder, optimizer)
    return decoder, optimizer


def train_once(decoder: Decoder, optimizer: torch.optim.Optimizer) -> None:
    """An update on random tokens."""
    config = decoder.config
    tokens = torch.randint(4, config.vocab_size, (3, config.max_tokens))
    optimizer.zero_grad()
    output = decoder(tokens[:, :-1])
    logits, targets = (x[:, config.prefix_tokens :] for x in (output.logits, tokens[:, 1:]))
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    (loss + sum(output.aux_losses.values())).backward()
    optimizer.step()


def state_of(decoder: Decoder, optimizer: torch.optim.Optimizer | None, arch: str, num_updates: int) -> dict[str, Any]:
    """What ``fairseq-train`` would save."""
    config = decoder.config
    options = {name: value for name, value in flatten(config).items() if name not in FROM_TASK}
    options |= {"_name": arch, "tokens_per_sample": config.max_tokens, "add_bos_token": False}
    history = {
        "criterion_name": "MoECrossEntropyCriterion",
        "optimizer_name": "FairseqAdam",
        "lr_scheduler_state": {"lr": 0.01},
        "num_updates": num_updates,
    }
    state = {
        "args": None,
        "cfg": {
            "model": options,
            "task": {"_name": "language_modeling", "data": "no/such/folder"},
            "criterion": {"_name": "moe_cross_entropy"},
            "optimizer": {"_name": "adam", "adam_betas": [0.9, 0.999]},
        },
        "model": {PREFIX + name: tensor for name, tensor in decoder.state_dict().items()},
        "criterion": None,
        "optimizer_history": [history],
        "task_state": {},
        "extra_state": {
            "metrics": {"train": [(10, "loss", "AverageMeter", {"val": torch.tensor(7.0), "count": 3})]},
            "train_iterator": {"version": 2, "epoch": 3, "iterations_in_epoch": 7, "shuffle": True},
        },
    }
    return state if optimizer is None else {**state, "last_optimizer_state": optimizer.state_dict()}


def save(folder: Path, arch: str, name: str = "whole.pt", updates: int = 2, seed: int = 0, **overrides: Any) -> Path:
    """A checkpoint in one file, with dict.txt next to it."""
    path = folder / name
    path.write_bytes(_saved(arch, updates, seed, tuple(overrides.items())))
    (folder / "dict.txt").write_text("".join(f"{word} 1\n" for word in WORDS))
    return path


@functools.lru_cache(maxsize=32)
def _saved(arch: str, updates: int, seed: int, overrides: tuple[tuple[str, Any], ...]) -> bytes:
    buffer = io.BytesIO()
    torch.save(state_of(*trained(arch, updates, seed, **dict(overrides)), arch, updates), buffer)
    return buffer.getvalue()


def differences(first: Any, second: Any, where: str = "") -> list[str]:
    """Places at which two nested values differ; tensors bit for bit."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        same = first.dtype == second.dtype and first.shape == second.shape
        return [] if same and torch.equal(_bits(first), _bits(second)) else [where]
    if isinstance(first, dict) and isinstance(second, dict):
        found = [f"{where}/{key}" for key in first.keys() ^ second.keys()]
        for key in first.keys() & second.keys():
            found += differences(first[key], second[key], f"{where}/{key}")
        return found
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)) and len(first) == len(second):
        return [
            found
            for number, pair in enumerate(zip(first, second, strict=True))
            for found in differences(*pair, f"{where}/{number}")
        ]
    return [] if first == second else [where]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def in_parts(whole: Path, folder: Path, num_parts: int = 4) -> Path:
    """The same checkpoint with its experts in parts, and dict.txt next to it."""
    path = folder / "checkpoint_last.pt"
    folder.mkdir()
    write_in_parts(open_checkpoint(whole), path, num_parts)
    shutil.copy(whole.parent / "dict.txt", folder)
    return path


def command(*arguments: object) -> int:
    """``smlp checkpoint ARGUMENTS``."""
    return main(["checkpoint", *map(str, arguments)])


def refused(capsys, *arguments: object) -> str:
    """The one sentence with which it fails."""
    assert command(*arguments) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("smlp: error: ") and printed.err.count("\n") == 1, printed.err
    return printed.err


def content(path: Path) -> dict[str, Any]:
    """What torch reads."""
    return torch.load(path, weights_only=True)
