"""The model card of an exported folder: what the model is, what it was trained on, and its limits."""

from __future__ import annotations

import json
from math import isfinite
from pathlib import Path
from typing import Any

from smlp.checkpoint.opened import Checkpoint
from smlp.costs.formula import flops_per_token
from smlp.evaluation.perplexity import of_bits

_CARD = """---
library_name: transformers
pipeline_tag: {pipeline}
tags:
- smlp
- {arch}
---

# {name}

{summary}

```python
import smlp.hf  # of the package smlp-lm, which trust_remote_code=True below would need too
from transformers import {auto}, AutoTokenizer

model = {auto}.from_pretrained({folder})
tokenizer = AutoTokenizer.from_pretrained({folder})
```

## Training

{training}

## Evaluation

{evaluation}

## Limits

{limits}
"""


def model_card(checkpoint: Checkpoint, name: str) -> str:
    """Return the text of the card (Markdown), from what the checkpoint records.

    Args:
        checkpoint: the model.
        name: of the folder.
    """
    config, cfg = checkpoint.config, checkpoint.state["cfg"]
    is_encoder = config.is_bidirectional
    flops = flops_per_token(config)
    total = sum(parameter.numel() for parameter in checkpoint.skeleton.parameters())
    experts = f", {config.num_experts} experts in each sparse block" if config.num_sparse_layers else ""
    summary = (
        f"{'An encoder' if is_encoder else 'A language model'} of the architecture `{checkpoint.arch}` of the package "
        f"smlp-lm, with {total:,} parameters{experts}: {config.num_dense_layers} dense and {config.num_sparse_layers} "
        f"sparse blocks of width {config.embed_dim}, a context of {config.max_tokens} tokens and a vocabulary of "
        f"{config.vocab_size:,}."
    )
    return _CARD.format(
        pipeline="fill-mask" if is_encoder else "text-generation",
        arch=checkpoint.arch,
        name=name,
        folder=json.dumps(name, ensure_ascii=False),
        summary=summary,
        auto="AutoModelForMaskedLM" if is_encoder else "AutoModelForCausalLM",
        training=_lines(_training(checkpoint, cfg, flops)),
        evaluation=_evaluation(checkpoint, cfg),
        limits=_lines(_limits(checkpoint)),
    )


def _lines(sentences: list[str]) -> str:
    return "\n".join(f"- {sentence}" for sentence in sentences)


def _part(cfg: Any, name: str, key: str) -> Any:
    part = cfg.get(name)
    return part.get(key) if hasattr(part, "get") else getattr(part, key, None)


def _training(checkpoint: Checkpoint, cfg: Any, flops: float) -> list[str]:
    folders = str(_part(cfg, "task", "data") or "").split(":")
    data = [name for name in (Path(folder).name for folder in folders) if name not in ("", "..")]
    lines = [
        f"Data: {', '.join(f'`{one}`' for one in data)} (the name of the folder that it was read from)."
        if data
        else "Data: not recorded.",
        f"Updates: {checkpoint.num_updates:,}.",
        f"A token costs {flops / 1e6:.3f} million multiply-adds in a forward pass of {checkpoint.config.max_tokens} "
        f"tokens; training on it costs about three times as much, {6 * flops / 1e6:.3f} million FLOPs.",
    ]
    rows, update_freq = _part(cfg, "dataset", "batch_size"), _part(cfg, "optimization", "update_freq")
    ranks = _part(cfg, "distributed_training", "distributed_world_size") or 1
    if rows and checkpoint.num_updates:
        freq = max(update_freq) if isinstance(update_freq, list | tuple) and update_freq else 1
        tokens = checkpoint.num_updates * rows * freq * ranks * checkpoint.config.max_tokens
        lines.append(
            f"At most {tokens:,} tokens were read ({rows} sequences on each of {ranks} ranks, {freq} times for each "
            f"update), which cost at most {6 * flops * tokens:.3g} FLOPs."
        )
    else:
        lines.append("The number of tokens read, and so the FLOPs of the whole training, is not recorded.")
    return lines


def _evaluation(checkpoint: Checkpoint, cfg: Any) -> str:
    best = (checkpoint.state.get("extra_state") or {}).get("best")
    if not isinstance(best, int | float) or _part(cfg, "checkpoint", "best_checkpoint_metric") not in (None, "loss"):
        return "No perplexity is recorded in the checkpoint."
    if not isfinite(perplexity := of_bits(best)):
        return "The training run diverged."
    what = "of masked tokens " if checkpoint.config.is_bidirectional else ""
    return (
        f"The best validation perplexity {what}of the training run was {perplexity:.2f} per token ({best:.3f} bits), "
        "on its own validation data. It may be that of another checkpoint of the run."
    )


def _limits(checkpoint: Checkpoint) -> list[str]:
    config = checkpoint.config
    lines = [
        f"A sequence has at most {config.max_tokens} tokens, and its positions are absolute: it begins at the first "
        "one. Padding may stand before or after a sequence and does not count as a position."
    ]
    if not config.is_bidirectional:
        lines.append("Lines end in `</s>`, which the tokenizer writes as a line break; generation stops there.")
    if config.prefix_tokens:
        lines.append(
            f"The first {config.prefix_tokens} positions only choose experts: nothing is predicted well there, and a "
            "prompt must be longer."
        )
    if config.is_leaky:
        lines.append(
            "The model sees the tokens that it predicts. Its losses look better than they are; it cannot write."
        )
    if config.num_sparse_layers and config.eval_capacity_factor:
        lines.append(
            f"Experts take at most {config.eval_capacity_factor:g} times their share of a batch, so that an output "
            "depends on what else is in the batch."
        )
    lines.append("It was not tuned to follow instructions, and repeats errors and prejudices of its data.")
    return lines
