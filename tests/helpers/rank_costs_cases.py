"""What ranks do in the tests of ``smlp costs``: functions that run on every rank."""

from __future__ import annotations

import contextlib
import io
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from rank_cases import ARCHS

from smlp.cli import main
from smlp.config.presets import preset
from smlp.costs import profiled
from smlp.parallel import connect


class SlowBackward(torch.autograd.Function):
    """The identity, with a slow backward pass."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(0.3)
        return grad


def costs_with_a_slow_rank() -> dict[str, dict[str, dict[str, float]]]:
    """Costs of the stages of an update where rank 1 is slow in its first block, and in the backward pass of the last
    sparse layer's experts."""
    ranks = connect(4, timeout=timedelta(seconds=20))
    original = profiled.model_of

    def slowed(config, ranks):
        model = original(config, ranks)
        if ranks.layout.rank == 1:
            model.blocks[0].register_forward_pre_hook(lambda module, inputs: time.sleep(0.3))
            model.blocks[2].token_moe.experts.register_forward_hook(lambda m, i, output: SlowBackward.apply(output))
        return model

    profiled.model_of = slowed
    name, small = ARCHS["smlp"]
    config = preset(name, **small)
    return profiled.measure(config, ranks, 2, 1, torch.device("cpu")).costs["layers"]


def costs_command_of_a_launcher(port: int, arguments: list[str], size: int | None = None) -> str:
    """What ``smlp costs`` prints, errors too, where a launcher such as torchrun has set the usual variables, which may
    tell of more ranks than there are."""
    rank, size = dist.get_rank(), size or dist.get_world_size()
    dist.barrier()  # a rank whose connections are closed while others still make theirs would fail them
    dist.destroy_process_group()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        main.main(arguments)
    return shown.getvalue()
