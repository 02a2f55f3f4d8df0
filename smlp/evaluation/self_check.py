"""Check that the ranks of this machine or cluster compute what one process computes; takes minutes at most.

Each check is a collective over all ranks and returns a sentence about what was seen, or raises.
"""

from __future__ import annotations

import shutil
import statistics
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from smlp.checkpoint.index import INDEX_KEY, ExpertIndex, describe_tensors, new_token, part_file
from smlp.checkpoint.parts import attach, detach, read_all, write_part
from smlp.config.presets import preset
from smlp.errors import ParallelError, UserError
from smlp.evaluation.leak import randomise
from smlp.launch.team import Team
from smlp.moe.experts import expert_parameters
from smlp.nn.decoder import Decoder
from smlp.parallel import (
    DistributedGroup,
    ExpertLayout,
    Ranks,
    connect,
    cut_state,
    global_grad_norm,
    reduce_expert_gradients,
)

#: architectures to compare: all-to-all of features and tokens, learned and balanced routing, dropped tokens
ARCHS = ("smlp_tiny", "smlp_partial_tiny", "switch_lm_tiny", "base_lm_tiny")
_SIZES = {"vocab_size": 40, "max_tokens": 12, "ffn_dim": 16, "num_heads": 2, "num_dense_layers": 2}
_TOLERANCE = 1e-9
_SPEED_BYTES = 2**24


def check_collectives(device: torch.device) -> str:
    """Check sums, maxima and gathered values; say how long the ranks need for a little and for a lot of data."""
    world = DistributedGroup(dist.group.WORLD)
    numbers = torch.arange(4, dtype=torch.float64, device=device) + world.rank
    total = world.all_reduce(numbers.clone(), "sum")
    largest = world.all_reduce(numbers.clone(), "maximum", "max")
    gathered = world.gather(numbers, "gather")
    little = _seconds(lambda: world.all_reduce(torch.ones(1, device=device), "a little"), device)
    data = torch.ones(_SPEED_BYTES // 4, device=device)
    splits = _splits(data.size(0), world.size)
    a_lot = _seconds(lambda: world.exchange(data, splits, [splits[world.rank]] * world.size, "a lot"), device)
    rate = _SPEED_BYTES / a_lot / 1e9
    # only now: a rank that left before the last collective would leave the others waiting
    _require_equal(total, sum(numbers - world.rank + rank for rank in range(world.size)))
    _require_equal(largest, numbers - world.rank + world.size - 1)
    for rank, part in enumerate(gathered):
        _require_equal(part, numbers - world.rank + rank)
    return f"right; an all-reduce of one number takes {little * 1e6:.0f} us, all-to-all moves {rate:.2f} GB/s a rank"


def _splits(num_rows: int, num_ranks: int) -> list[int]:
    return [num_rows // num_ranks + (rank < num_rows % num_ranks) for rank in range(num_ranks)]


def _seconds(collective: object, device: torch.device) -> float:
    """Return the median time of some calls."""
    times = []
    for _ in range(7):
        start = time.perf_counter()
        collective()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def check_uneven_splits(device: torch.device, dtype: torch.dtype) -> str:
    """Check an all-to-all in which rank r sends (r + s) % 3 rows to rank s, none to some ranks, and its gradients."""
    world = DistributedGroup(dist.group.WORLD)
    sent = [(world.rank + other) % 3 for other in range(world.size)]
    rows = torch.tensor([[world.rank, other] for other, n in enumerate(sent) for _ in range(n)], device=device)
    rows = rows.view(-1, 2).to(dtype).requires_grad_()
    received = world.all_to_all(rows, sent, sent, "uneven splits")
    (grad,) = torch.autograd.grad(received, rows, received.detach())
    _require_equal(received, rows.flip(1))
    _require_equal(grad, rows.detach())
    return f"{sum(sent)} rows from rank {world.rank}, none to some ranks: right, and so are the gradients"


def check_layout(arch: str, device: torch.device, timeout: timedelta) -> str:
    """Check that one update of a tiny model with experts spread over all ranks is that of one process with all experts.

    Each rank has two experts and its own batch (the last rank's is empty if there are several), in float64.
    """
    ranks = connect(2 * dist.get_world_size(), timeout=timeout)
    oracle, model = _models(arch, ranks, device)
    names = [name for name, _, _ in expert_parameters(oracle)]
    ids = _batch(ranks.layout.rank, ranks.layout.world_size, device)
    losses = [_loss(each, ids) for each in (oracle, model)]
    for loss in losses:
        loss.backward()
    for parameter in oracle.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        ranks.world.all_reduce(parameter.grad, "gradients of one process")
    dense, experts = _dense_and_experts(model)
    reduce_expert_gradients(dense, ranks.world)
    reduce_expert_gradients(experts, ranks.replicas)
    norm = global_grad_norm(dense, experts, ranks)
    want = cut_state({name: p.grad for name, p in oracle.named_parameters()}, names, ranks.layout)
    _require_equal(losses[1], losses[0], f"{arch}: the loss")
    for name, parameter in model.named_parameters():
        _require_equal(parameter.grad, want[name], f"{arch}: the gradient of {name}")
    _require_equal(norm, nn.utils.get_total_norm([p.grad for p in oracle.parameters()]), f"{arch}: the gradient norm")
    layout = ranks.layout
    return f"{layout.num_experts} over {layout.group_size} ranks: loss, gradients and norm as in one process"


def _models(arch: str, ranks: Ranks, device: torch.device) -> tuple[Decoder, Decoder]:
    """Return a model with all experts, and one with this rank's, with the same weights."""
    num_experts = ranks.layout.num_experts
    config = preset(
        arch, **_SIZES, embed_dim=8 * num_experts, num_sparse_layers=2, num_experts=num_experts, dropout=0.0
    )
    torch.manual_seed(0)
    oracle = randomise(Decoder(config))
    model = Decoder(config, ranks)
    names = [name for name, _, _ in expert_parameters(oracle)]
    model.load_state_dict(cut_state(oracle.state_dict(), names, ranks.layout))
    return oracle.double().to(device), model.double().to(device)


def _batch(rank: int, world_size: int, device: torch.device) -> Tensor:
    num_seqs = 0 if world_size > 1 and rank == world_size - 1 else 2
    ids = torch.randint(2, 40, (num_seqs, 12), generator=torch.Generator().manual_seed(rank))
    return ids.to(device)


def _loss(model: Decoder, ids: Tensor) -> Tensor:
    output, prefix = model(ids), model.config.prefix_tokens
    logits, targets = output.logits[:, prefix:-1].flatten(0, 1), ids[:, prefix + 1 :].flatten()
    return F.cross_entropy(logits, targets, reduction="sum") + sum(output.aux_losses.values())


def _dense_and_experts(model: Decoder) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    experts = [parameter for _, parameter, _ in expert_parameters(model)]
    owned = {id(parameter) for parameter in experts}
    return [parameter for parameter in model.parameters() if id(parameter) not in owned], experts


def check_checkpoint(folder: Path, device: torch.device, timeout: timedelta) -> str:
    """Check that experts which the ranks write into a folder are read back by all of them, on this layout and on
    others. Where a rank cannot write, that rank raises and the others have nothing to check.

    Raises:
        UserError: the folder is not on a disk that all ranks share, or cannot be written.
    """
    ranks = connect(2 * dist.get_world_size(), timeout=timeout)
    oracle, model = _models("smlp_tiny", ranks, device)
    names = [name for name, _, _ in expert_parameters(oracle)]
    layout, part = ranks.layout, None
    team = Team(layout.rank, layout.world_size)
    token = team.gather(new_token())[0]
    own = folder / f"smlp-doctor-{token}"
    try:
        state = {"model": model.state_dict()}
        tensors = detach(state, names, {})
        try:
            part = write_part(own, part_file(0, token, layout.expert_ids), token, layout.expert_ids, tensors)
        finally:
            parts = team.gather(part)
        if None in parts:
            return "another rank cannot write"
        unseen = [p.file for p in parts if not (own / p.file).is_file()]
        if unseen:
            raise UserError(
                f"rank {layout.rank} does not see {len(unseen)} of the {len(parts)} files that the ranks wrote into "
                f"{folder}: name a folder on a disk that all nodes share with --dir"
            )
        index = ExpertIndex(
            token, layout.num_experts, layout.world_size, layout.group_size, tuple(parts), describe_tensors(tensors), {}
        )
        state[INDEX_KEY] = index.to_plain()
        attach(state, own / "checkpoint.pt")
        whole = {name: tensor.cpu() for name, tensor in oracle.state_dict().items()}
        for group_size in {1, layout.group_size}:
            other = ExpertLayout(layout.num_experts, layout.world_size, layout.rank, group_size)
            for name, tensor in read_all(state["model"], other.expert_ids).items():
                want = cut_state({name: whole[name]}, names, other)[name]
                _require_equal(tensor.cpu(), want, f"the checkpoint's {name}")
    finally:
        try:
            team.gather(None)  # until every rank has read, or failed to
        finally:
            shutil.rmtree(own, ignore_errors=True)
    return f"{len(parts)} files in {folder}, read back by every rank, all experts and its own"


def _require_equal(got: Tensor, want: Tensor, what: str = "a collective's result") -> None:
    got, want = got.detach(), want.detach()
    scale = float(want.abs().max()) if want.numel() else 0.0
    difference = float((got - want).abs().max()) if got.shape == want.shape and got.numel() else 0.0
    if got.shape != want.shape or not difference <= _TOLERANCE * max(1.0, scale):
        raise ParallelError(f"{what} is wrong on rank {dist.get_rank()}: it differs by {difference:.2g} of {scale:.2g}")
