"""What ranks do in the tests of exchanges in chunks: functions that run on every rank, and assert there."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from rank_cases import ARCHS, batch, gradients, loss_of, same, train_one_update
from torch.utils.checkpoint import checkpoint

from smlp.cli import main
from smlp.config.presets import preset
from smlp.costs import profiled
from smlp.errors import UserError
from smlp.evaluation.leak import randomise
from smlp.moe.chunked_exchange import ChunkedFeatureExchange, ChunkedTokenExchange
from smlp.nn.decoder import Decoder
from smlp.nn.state import DecodingState
from smlp.parallel import DistributedGroup, Ranks, connect
from smlp.parallel.in_chunks import Trip, begin, end, start_of_order


def _model(arch: str, ranks: Ranks, **settings) -> Decoder:
    """With large random weights, always the same."""
    name, small = ARCHS[arch]
    torch.manual_seed(7)
    config = preset(name, **{**small, "num_experts": ranks.layout.num_experts, **settings})
    return randomise(Decoder(config, ranks)).double()


def chunks_change_nothing(
    group_size: int,
    archs: list[str],
    num_experts: int,
    chunks: int,
    updates: int,
    only_experts: bool = False,
    **settings,
) -> None:
    """Losses, norm and gradients, of all parameters or of experts alone, are those of the exchange without chunks."""
    ranks = connect(num_experts, group_size, timeout=timedelta(seconds=20))
    for arch in archs:
        plain = _model(arch, ranks, **settings)
        chunked = [
            _model(arch, ranks, overlap_chunks=chunks, checkpoint_activations=again, **settings)
            for again in (False, True)
        ]
        for model in chunked:
            kinds = {type(module.dispatcher) for module in model.modules() if hasattr(module, "dispatcher")}
            assert kinds and kinds <= {ChunkedTokenExchange, ChunkedFeatureExchange}
            same(model.state_dict(), plain.state_dict(), "initial values", 0)
        for update in range(updates):
            want = None
            for model in (plain, *chunked):
                for name, parameter in model.named_parameters():
                    parameter.requires_grad_(not only_experts or ".experts." in name)
                model.zero_grad()
                loss = loss_of(model, batch(update, ranks.layout.rank), seed=update)
                got = {"loss": loss.detach(), "norm": train_one_update(model, ranks, [loss]), **gradients(model)}
                want = want or got
                recomputes = model.config.checkpoint_activations
                same(got, want, f"{arch}, update {update}, rank {ranks.layout.rank}, {recomputes=}", 1e-12)


def chunks_change_nothing_in_evaluation(archs: list[str], rounds: int) -> None:
    """Logits of whole sequences, of lengths on both sides of sMLP-partial's prefix, and of text written token by token
    after prompts that differ from rank to rank."""
    ranks = connect(8, timeout=timedelta(seconds=20))
    rank, shapes = ranks.layout.rank, [(2, 10), (2, 2), (0, 1), (1, 6), (3, 1)]
    for arch in archs:
        seen = []
        for chunks in (1, 2):
            model = _model(arch, ranks, overlap_chunks=chunks).eval()
            with torch.no_grad():
                got = {f"round {number}": model(batch(number, rank, shapes)).logits for number in range(rounds)}
                ids, state = batch(0, 0, [(2, 10)]), DecodingState()
                got["prompt"] = model(ids[:, : 3 + rank], state).logits
                got |= {f"step {i}": model(ids[:, 3 + rank + i : 4 + rank + i], state).logits for i in range(3)}
            seen.append(got)
        same(seen[1], seen[0], f"{arch}, rank {rank}", 1e-12)


class Log:
    """What this rank's groups do from now on, in order."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        exchange, begin = DistributedGroup.exchange, DistributedGroup.begin

        def logged_exchange(group, x, send, receive, name):
            self.lines.append(name.partition(", before")[0])
            return exchange(group, x, send, receive, name)

        def logged_begin(group, x, send, receive, name, into=None):
            self.lines.append(f"begin {name}")
            wait = begin(group, x, send, receive, name, into)
            return lambda: (self.lines.append(f"wait {name}"), wait())[1]

        DistributedGroup.exchange, DistributedGroup.begin = logged_exchange, logged_begin


def order_of_collectives(
    archs: list[str], chunks: int, updates: int, only_experts: bool = False, **settings
) -> list[str]:
    """What happens on this rank, with batches that differ from the others'."""
    ranks = connect(8, timeout=timedelta(seconds=20))
    log = Log()
    for arch in archs:
        model = _model(arch, ranks, overlap_chunks=chunks, **settings)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not only_experts or ".experts." in name)
        for update in range(updates):
            loss_of(model, batch(update, ranks.layout.rank), seed=update).backward()
    return log.lines


def checkpointed_chunks() -> list[str]:
    """A block in which only rank 1 saves a tensor after the exchange, and rank 2 does not use what came first: they run
    the same collectives all the same."""
    group = DistributedGroup(dist.group.WORLD)
    log, splits = Log(), [[1] * group.size] * 2

    def block(x):
        trip = Trip(group, splits, splits, splits=True, name="trip")
        order = begin(x.exp(), start_of_order(x), trip, [0, 1])
        first, order = end(order, trip, [0])
        second, _ = end(order, trip, [1])
        return {0: first + second, 1: first * second, 2: second}[group.rank]

    x = torch.full((2 * group.size, 1), float(group.rank), dtype=torch.double, requires_grad=True)
    checkpoint(block, x, use_reentrant=False).sum().backward()
    slope = torch.ones(2, group.size, 1, dtype=torch.double)
    slope[:, 1], slope[0, 2] = x[0].detach().exp(), 0
    torch.testing.assert_close(x.grad, slope.flatten(0, 1) * x.detach().exp())
    return log.lines


def fails_between_chunks(how: str, seconds: float) -> None:
    """Rank 1 dies, raises or stops for a long time where chunks of a layer are on their way."""
    ranks = connect(8, timeout=timedelta(seconds=seconds))
    model = _model("base", ranks, overlap_chunks=2)
    loss_of(model, batch(0, ranks.layout.rank), seed=0).backward()

    def fail(module, arguments) -> None:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raises":
            raise UserError("the experts of rank 1 cannot be run")
        time.sleep(2 * seconds)
        os._exit(0)

    if ranks.layout.rank == 1:
        model.blocks[1].token_moe.experts.register_forward_pre_hook(fail)
    loss_of(model, batch(0, ranks.layout.rank), seed=0).backward()


class SlowBackward(torch.autograd.Function):
    """The identity, with a slow backward pass."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(0.3)
        return grad


def costs_with_a_slow_rank(chunks: int) -> dict[str, dict[str, float]]:
    """Seconds of the stages of an update where rank 1 is slow in its first block, and in the backward pass of the last
    sparse layer's experts."""
    ranks = connect(4, timeout=timedelta(seconds=20))
    original = profiled.Decoder

    def slowed(config, ranks):
        model = original(config, ranks)
        if ranks.layout.rank == 1:
            model.blocks[0].register_forward_pre_hook(lambda module, inputs: time.sleep(0.3))
            model.blocks[2].token_moe.experts.register_forward_hook(lambda m, i, output: SlowBackward.apply(output))
        return model

    profiled.Decoder = slowed
    name, small = ARCHS["smlp"]
    config = preset(name, **{**small, "overlap_chunks": chunks})
    return profiled.measure(config, ranks, 2, 1, torch.device("cpu")).costs.layers


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
