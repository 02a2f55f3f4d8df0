"""Records what fairseq's trainer computes, for comparison with a run on other ranks.

Used in the processes of ``fairseq_forks``: what it hangs itself on is fairseq's, and runs after the plug-in's parts.
"""

from __future__ import annotations

import atexit
import json
from pathlib import Path
from typing import Any

import torch


def record(path: Path) -> None:
    """From now on keeps losses, gradients as they reach the optimizer and gradient norms, and writes them to ``path``
    when :func:`atexit` functions are run."""
    from fairseq.trainer import Trainer

    updates: list[dict[str, Any]] = []
    check_norms, log_stats = Trainer._check_grad_norms, Trainer._reduce_and_log_stats

    def after_clipping(self: Trainer, grad_norm: torch.Tensor) -> None:
        model = self.get_model()
        experts = getattr(model, "experts", None)
        spread = experts is not None and experts.are_spread
        # half-precision optimizers scale gradients only when they use them
        factor = float(getattr(self.optimizer, "_multiply_factor", 1))
        updates.append(
            {
                "norm": float(grad_norm),
                "seed": torch.initial_seed(),
                "grads": {n: p.grad * factor for n, p in model.named_parameters() if p.grad is not None},
                "expert_names": experts.names if spread else (),
                "expert_ids": list(experts.ranks.layout.expert_ids) if spread else [],
            }
        )
        check_norms(self, grad_norm)

    def after_update(self: Trainer, logging_outputs: list, sample_size: Any, grad_norm: Any = None) -> Any:
        if grad_norm is not None:
            total = sum(float(log["loss"]) for log in logging_outputs)
            updates[-1] |= {"loss": total / float(sample_size), "sample_size": float(sample_size)}
            updates[-1] |= {"num_tokens": sum(int(log["ntokens"]) for log in logging_outputs)}
        return log_stats(self, logging_outputs, sample_size, grad_norm)

    Trainer._check_grad_norms, Trainer._reduce_and_log_stats = after_clipping, after_update
    atexit.register(lambda: torch.save(updates, path))


def record_samples(path: Path) -> None:
    """From now on keeps the ids of all sequences of every update, and writes them to ``path`` as JSON at the end."""
    from fairseq.trainer import Trainer

    updates: list[list[list[int]]] = []
    train_step = Trainer.train_step

    def before(self: Trainer, samples: list, *args: Any, **kwargs: Any) -> Any:
        pad = self.task.dictionary.pad()
        rows = [row for sample in samples for row in sample["target"].tolist()]
        updates.append([[token for token in row if token != pad] for row in rows])
        return train_step(self, samples, *args, **kwargs)

    Trainer.train_step = before
    atexit.register(lambda: path.write_text(json.dumps(updates)))


def updates_of(folder: Path, ranks: int) -> list[dict[str, Any]]:
    """What ``ranks`` ranks recorded, with the gradients of all experts in one place; checks that ranks agree on the
    rest."""
    recorded = [torch.load(folder / f"{rank}.pt") for rank in range(ranks)]
    merged = []
    for of_ranks in zip(*recorded, strict=True):
        first = of_ranks[0]
        grads = {}
        for name, grad in first["grads"].items():
            if name in first["expert_names"]:
                rows = {e: other["grads"][name][i] for other in of_ranks for i, e in enumerate(other["expert_ids"])}
                grad = torch.stack([rows[expert] for expert in sorted(rows)])
            else:
                assert all(torch.equal(other["grads"][name], grad) for other in of_ranks), name
            grads[name] = grad
        for key in ("norm", "loss", "sample_size", "num_tokens"):
            assert all(other[key] == first[key] for other in of_ranks), (key, [other[key] for other in of_ranks])
        merged.append({**first, "grads": grads})
    return merged
