"""What ranks do in the tests of models on several ranks: functions that run on every rank, and assert there.

The oracle is the same model in one process, with all experts, that processes the micro-batches of all ranks one after
the other. With two ranks each computes all of it for itself. With more, to save time, each computes the oracle's
gradients for its own micro-batch, and torch.distributed adds them up.
"""

from __future__ import annotations

import copy
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from smlp.config.presets import preset
from smlp.evaluation.leak import randomise
from smlp.moe.experts import expert_parameters
from smlp.nn.decoder import Decoder
from smlp.nn.state import DecodingState
from smlp.parallel import Ranks, connect, cut_state, global_grad_norm, reduce_expert_gradients, whole_state

PAD = 1
SMALL = {"vocab_size": 30, "max_tokens": 10, "embed_dim": 16, "ffn_dim": 16, "num_heads": 2, "num_experts": 4}
SMALL |= {"num_dense_layers": 2, "num_sparse_layers": 2}
DENSE = {**SMALL, "num_dense_layers": 3, "num_sparse_layers": 0}
ARCHS = {
    "smlp": ("smlp_tiny", SMALL),
    "smlp_partial": ("smlp_partial_tiny", SMALL),
    "gmlp_moe": ("gmlp_moe_tiny", SMALL),
    "gmlp_moe_top2": ("gmlp_moe_tiny", {**SMALL, "router": "gshard"}),
    "gshard": ("gshard_lm_tiny", {**SMALL, "capacity_factor": 0.6}),
    "switch": ("switch_lm_tiny", {**SMALL, "capacity_factor": 0.5, "router_jitter": 0.1, "router_z_weight": 0.01}),
    "base": ("base_lm_tiny", SMALL),
    "hash": ("hash_lm_tiny", SMALL),
    "dense": ("dense_lm_tiny", DENSE),
    "gmlp": ("gmlp_lm_tiny", DENSE),
}
#: sequences and tokens of the ranks' batches, which take turns: unequal, one without any, one with a single sequence
SHAPES = [(2, 10), (3, 7), (0, 10), (1, 4), (0, 0)]


def batch(update: int, rank: int, shapes: list | None = None) -> torch.Tensor:
    """Ids (B, n) with padding on the right, and sometimes a row of nothing but padding."""
    shapes = shapes or SHAPES
    generator = torch.Generator().manual_seed(100 * update + rank)
    num_seqs, num_tokens = shapes[(update + rank) % len(shapes)]
    ids = torch.randint(2, 30, (num_seqs, num_tokens), generator=generator)
    lengths = torch.randint(3, num_tokens + 5, (num_seqs, 1), generator=generator) if num_tokens else ids
    ids = ids.masked_fill(torch.arange(num_tokens) >= lengths, PAD)
    if num_seqs == 3:
        ids[1] = PAD
    return ids


def loss_of(model: torch.nn.Module, ids: torch.Tensor, seed: int) -> torch.Tensor:
    """Sum over a micro-batch, with its own random numbers (dropout, jitter, second experts); of a decoder, wrapped or
    not."""
    torch.manual_seed(seed)
    output = model(ids)
    prefix = getattr(model, "module", model).config.prefix_tokens
    logits = output.logits[:, prefix:-1].flatten(0, 1)
    targets = ids[:, prefix + 1 :].flatten()
    return F.cross_entropy(logits, targets, ignore_index=PAD, reduction="sum") + sum(output.aux_losses.values())


def build_both(arch: str, ranks: Ranks, dtype: torch.dtype = torch.double, **settings) -> tuple[Decoder, Decoder]:
    """The oracle and this rank's model, with the same large random weights."""
    name, small = ARCHS[arch]
    config = preset(name, **{**small, **settings})
    torch.manual_seed(7)
    oracle = Decoder(config)
    after = torch.get_rng_state()
    torch.manual_seed(7)
    model = Decoder(config, ranks)
    assert torch.equal(torch.get_rng_state(), after), "another number of experts draws other random numbers"
    names = [name for name, _, _ in expert_parameters(oracle)]
    assert names == [name for name, _, _ in expert_parameters(model)]
    assert all(ids == ranks.layout.expert_ids for _, _, ids in expert_parameters(model))
    same(model.state_dict(), cut_state(oracle.state_dict(), names, ranks.layout), f"{arch}: initial values", 0)
    randomise(oracle).to(dtype)
    model.to(dtype).load_state_dict(cut_state(oracle.state_dict(), names, ranks.layout))
    return oracle, model


def same(got: dict, want: dict, what: str, tolerance: float = 1e-9) -> None:
    """Tensors by name are the same."""
    assert got.keys() == want.keys(), what
    for name, value in want.items():
        torch.testing.assert_close(
            got[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{what}, {name}: {m}"
        )


def gradients(model: Decoder) -> dict[str, torch.Tensor]:
    """By name; zeros where there is none."""
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}


def add_up(oracle: Decoder) -> None:
    """Sums the oracle's gradients over all processes."""
    grads = gradients(oracle)
    flat = torch.cat([grad.flatten() for grad in grads.values()])
    dist.all_reduce(flat)
    for parameter, summed in zip(oracle.parameters(), flat.split([g.numel() for g in grads.values()]), strict=True):
        parameter.grad = summed.view_as(parameter)


def train_one_update(model: Decoder, ranks: Ranks, losses: list[torch.Tensor]) -> torch.Tensor:
    """Backward, and every reduction that a trainer does; returns the gradient norm."""
    experts = [parameter for _, parameter, _ in expert_parameters(model)]
    owned = {id(parameter) for parameter in experts}
    dense = [parameter for parameter in model.parameters() if id(parameter) not in owned]
    for loss in losses:
        loss.backward()
    reduce_expert_gradients(dense, ranks.world)  # as experts that all ranks hold
    reduce_expert_gradients(experts, ranks.replicas)
    return global_grad_norm(dense, experts, ranks)


def same_as_one_process(group_size: int, archs: list[str], updates: int = 5, **settings) -> list[float]:
    """Losses, gradients, gradient norm and parameters of some updates; returns the norms of the last architecture."""
    norms = []
    for arch in archs:
        ranks = connect(4, group_size, timeout=timedelta(seconds=30))
        oracle, model = build_both(arch, ranks, **settings)
        names = {name for name, _, _ in expert_parameters(oracle)}
        optimizers = [torch.optim.Adam(m.parameters(), lr=0.01, eps=1e-3) for m in (oracle, model)]
        norms = []
        for update in range(updates):
            world, rank = ranks.layout.world_size, ranks.layout.rank
            theirs = {}
            for other in range(world) if world == 2 else [rank]:
                theirs[other] = loss_of(oracle, batch(update, other), seed=50 * update + other)
                theirs[other].backward()
            if world > 2:
                add_up(oracle)
            ours = loss_of(model, batch(update, rank), seed=50 * update + rank)
            norm = train_one_update(model, ranks, [ours])
            what = f"{arch}, W={world}, P={group_size}, update {update}, rank {rank}"
            same({"loss": ours}, {"loss": theirs[rank]}, what)
            same(gradients(model), cut_state(gradients(oracle), names, ranks.layout), what)
            want = torch.nn.utils.get_total_norm([p.grad for p in oracle.parameters() if p.grad is not None])
            same({"norm": norm}, {"norm": want}, what)
            norms.append(norm.item())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        same(model.state_dict(), cut_state(oracle.state_dict(), names, ranks.layout), f"{arch}: parameters", 1e-7)
        moments = [
            {n: o.state[p]["exp_avg_sq"] for n, p in m.named_parameters()}
            for o, m in zip(optimizers, (oracle, model), strict=True)
        ]
        same(moments[1], cut_state(moments[0], names, ranks.layout), f"{arch}: second moments", 1e-7)
    return norms


def all_tokens_to_one_expert(group_size: int) -> None:
    """Of the last rank, in both passes, with a rank that has no batch: the other experts get none."""
    ranks = connect(4, group_size)
    oracle, model = build_both("hash", ranks)
    names = {name for name, _, _ in expert_parameters(oracle)}
    for layer in [*oracle.modules(), *model.modules()]:
        if hasattr(layer, "table"):
            layer.table.fill_(3)
    rank, world = ranks.layout.rank, ranks.layout.world_size
    shapes = [(2, 6)] + [(0, 6)] * (world - 1)
    ours = loss_of(model, batch(0, rank, shapes), seed=rank)
    train_one_update(model, ranks, [ours])
    for other in range(world):
        loss_of(oracle, batch(0, other, shapes), seed=other).backward()
    same(gradients(model), cut_state(gradients(oracle), names, ranks.layout), f"rank {rank}")
    idle = [grad[:3] for name, grad in gradients(oracle).items() if name in names]
    assert idle and all((grad == 0).all() for grad in idle)


def several_micro_batches(group_size: int) -> None:
    """Gradients of three micro-batches add up before they are reduced (--update-freq)."""
    ranks = connect(4, group_size)
    oracle, model = build_both("smlp", ranks)
    model = copy.deepcopy(model)
    names = {name for name, _, _ in expert_parameters(oracle)}
    rank = ranks.layout.rank
    train_one_update(model, ranks, [loss_of(model, batch(u, rank), seed=u) for u in range(3)])
    for update in range(3):
        for other in range(ranks.layout.world_size):
            loss_of(oracle, batch(update, other), seed=update).backward()
    same(gradients(model), cut_state(gradients(oracle), names, ranks.layout), f"rank {rank}")


def inside_torchs_wrappers(archs: list[str]) -> None:
    """Two updates in each of torch's own wrappers, each rank with its batch, are those of one process with all batches.

    FSDP2 as its tutorial has it: built on the meta device, cut, given memory, then loaded.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    shapes = [(2, 10), (3, 7)]
    for arch in archs:
        name, small = ARCHS[arch]
        config = preset(name, **{**small, "positions": "sinusoidal"})
        oracle = randomise(Decoder(config)).double()
        start = copy.deepcopy(oracle.state_dict())
        optimizer = torch.optim.SGD(oracle.parameters(), lr=0.01)
        for update in range(2):
            optimizer.zero_grad()
            for other in range(world):
                (loss_of(oracle, batch(update, other, shapes), seed=other) / world).backward()
            optimizer.step()
        for wrap in ({}, {"find_unused_parameters": True}, {"static_graph": True}, "fsdp2"):
            if wrap == "fsdp2":
                with torch.device("meta"):
                    model = Decoder(config).double()
                for module in (*model.blocks, model):
                    fully_shard(module)
                model.to_empty(device="cpu")
                set_model_state_dict(model, start, options=StateDictOptions(full_state_dict=True, strict=True))
                wrapped = model
            else:
                model = Decoder(config).double()
                model.load_state_dict(start)
                wrapped = DistributedDataParallel(model, **wrap)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            for update in range(2):
                optimizer.zero_grad()
                loss_of(wrapped, batch(update, rank, shapes), seed=rank).backward()
                optimizer.step()
            got = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
            if got:  # of FSDP2 the first rank has it
                same(got, oracle.state_dict(), f"{arch} in {wrap or 'DDP'}")


def evaluate(group_size: int, archs: list[str]) -> None:
    """Logits in evaluation: ranks with lengths on both sides of sMLP-partial's prefix, or without any sequence."""
    ranks = connect(4, group_size)
    shapes = [(2, 10), (2, 2), (0, 1), (1, 6), (3, 1)]
    for arch in archs:
        oracle, model = build_both(arch, ranks)
        for round_number in range(4):
            ids = batch(round_number, ranks.layout.rank, shapes)
            with torch.no_grad():
                want, got = oracle.eval()(ids).logits, model.eval()(ids).logits
            same({"logits": got}, {"logits": want}, f"{arch}, rank {ranks.layout.rank}, round {round_number}")


def decode(group_size: int, archs: list[str]) -> None:
    """Token by token, on each rank from a prompt of another length; a rank that is done goes on without sequences."""
    ranks = connect(4, group_size)
    rank = ranks.layout.rank
    prompt, end = 1 + 2 * rank, 10 - rank
    ids = torch.randint(2, 30, (2, end), generator=torch.Generator().manual_seed(rank))
    for arch in archs:
        oracle, model = (each.eval() for each in build_both(arch, ranks))
        with torch.no_grad():
            want = oracle(ids).logits
            state = DecodingState()
            got = [model(ids[:, :prompt], state).logits]
            for position in range(1, 10):
                if prompt + position <= end:
                    got.append(model(ids[:, prompt + position - 1 : prompt + position], state).logits)
                else:
                    model(ids[:0, :1])
        same({"logits": torch.cat(got, dim=1)}, {"logits": want}, f"{arch}, rank {rank}")


def half_precision(group_size: int, archs: list[str]) -> None:
    """Losses in bfloat16 are near those of float64, and every gradient is finite."""
    ranks = connect(4, group_size)
    for arch in archs:
        oracle, model = build_both(arch, ranks, dropout=0.0)
        ids = batch(0, ranks.layout.rank)
        want, got = loss_of(oracle, ids, seed=0), loss_of(model.bfloat16(), ids, seed=0)
        assert train_one_update(model, ranks, [got]).isfinite()
        assert abs(got - want) <= 0.05 * abs(want), (arch, got.item(), want.item())
        assert all(grad.dtype == torch.bfloat16 and grad.isfinite().all() for grad in gradients(model).values())


def states_go_round(group_size: int) -> None:
    """Whole state dicts on all ranks, and back; bit for bit, also of half precision and scalars."""
    ranks = connect(4, group_size)
    oracle, model = build_both("smlp_partial", ranks, dtype=torch.float32)
    names = [name for name, _, _ in expert_parameters(model)]
    for dtype in (torch.float32, torch.bfloat16):
        want, own = oracle.to(dtype).state_dict(), model.to(dtype).state_dict()
        want["step"] = own["step"] = torch.tensor(5)
        everywhere = whole_state(own, [*names, "step"], ranks)
        same(everywhere, want, "whole", 0)
        same(cut_state(everywhere, [*names, "step"], ranks.layout), own, "cut", 0)


def bad_gradients(group_size: int) -> list[list[str]]:
    """The norm that each rank sees when one rank's expert gradient is inf or NaN."""
    ranks = connect(4, group_size)
    seen = []
    for value in (float("inf"), float("nan")):
        experts = [torch.nn.Parameter(torch.ones(3))]
        dense = [torch.nn.Parameter(torch.ones(2))]
        for parameter in (*experts, *dense):
            parameter.grad = torch.ones_like(parameter)
        if ranks.layout.rank == ranks.layout.world_size - 1:
            experts[0].grad[1] = value
        seen.append(str(global_grad_norm(dense, experts, ranks).item()))
    return seen
