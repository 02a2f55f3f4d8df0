"""Runs of fairseq-train on one layout of ranks or another, and what they leave."""

from __future__ import annotations

import torch
from running import USER_DIR

from smlp.checkpoint.parts import attach, read_all

UPDATES = 5
SIZES = [
    *(
        "--embed-dim",
        16,
        "--ffn-dim",
        16,
        "--num-heads",
        2,
        "--tokens-per-sample",
        16,
        "--batch-size",
        12,
        "--required-batch-size-multiple",
        1,
    ),
    *("--dropout", 0, "--clip-norm", 0.5, "--lr", 0.01, "--num-workers", 0),
    *("--max-update", UPDATES, "--no-epoch-checkpoints", "--disable-validation", "--log-interval", 1),
    *("--log-format", "none", "--task", "language_modeling", "--ddp-backend", "legacy_ddp"),
]
ADAM = ["--optimizer", "adam", "--adam-eps", 1e-4]
SPARSE = ["--num-dense-layers", 2, "--num-sparse-layers", 2, "--num-experts", 4]
DENSE = ["--num-dense-layers", 2]
#: routers and optimizers with a state of their own, which changes in the course of a run
WITH_STATE = {
    "smlp, loss_free": [
        *("--router", "loss_free", "--loss-free-rate", 0.01, "--router-freeze", 0.7, "--smlp-feature-scale", 0.1),
        *("--smlp-projection-dim", 4, "--weight-decay", 0.1, "--no-decay-norms"),
        *("--spatial-lr-factor", 0.3, "--spatial-weight-decay", 0.01),
    ],
    "smlp, base": ["--base-offset-rate", 0.1, "--base-warmup", 0.5, "--smlp-order", "tokens_first"],
}
ARCHS = {
    "dense_lm": DENSE,
    "gmlp_lm": DENSE,
    "smlp": SPARSE,
    "smlp_partial": SPARSE,
    # which second experts are kept, what is dropped out and the noise are drawn: the same for a batch on any rank
    "gshard_lm": [*SPARSE, "--dropout", 0.1, "--capacity-factor", 0.7],
    "switch_lm": [*SPARSE, "--router-jitter", 0.1, "--capacity-factor", 0.7],
    "base_lm": SPARSE,
    "hash_lm": SPARSE,
    **{name: [*SPARSE, *more] for name, more in WITH_STATE.items()},
}


def command(data, arch: str, world: int, group_size: int, *more) -> dict:
    """A case for ``run_fairseq_many``."""
    args = [data, "--user-dir", USER_DIR, "--arch", f"{arch.split(',')[0]}_tiny", *SIZES, *ARCHS[arch]]
    spread = ["--expert-parallel-size", group_size] if ARCHS[arch][-1] != DENSE[-1] else []
    args += [*([] if "--optimizer" in more else ADAM), *spread, "--update-freq", 4 // world, *more]
    return {"tool": "train", "args": args, "ranks": world, "timeout": 60}


def saved(folder) -> dict[str, torch.Tensor]:
    """Parameters, buffers and moments of the last checkpoint, with all experts."""
    state = torch.load(folder / "checkpoint_last.pt")
    attach(state, folder / "checkpoint_last.pt")
    tensors = read_all(state["model"])
    for number, moments in state["last_optimizer_state"]["state"].items():
        tensors |= {f"{number}/{name}": m for name, m in read_all(moments).items() if torch.is_tensor(m)}
    return tensors


def same(got: torch.Tensor, want: torch.Tensor, what: str, tolerance: float) -> None:
    """Equal up to rounding, relative to the largest number of the tensor."""
    assert got.shape == want.shape, what
    if want.is_floating_point():
        scale = max(1.0, float(want.abs().max()))
        assert float((got - want).abs().max()) <= tolerance * scale, (what, float((got - want).abs().max()), scale)
    else:
        assert torch.equal(got, want), what
