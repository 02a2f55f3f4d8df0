"""What ranks do in the tests of groups, exchanges and failures: functions that run on every rank, and assert there."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import rank_cases
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from smlp.errors import UserError
from smlp.moe.exchange import FeatureExchange, TokenExchange
from smlp.moe.plan import RoutingPlan
from smlp.parallel import DistributedGroup, ExpertLayout, Ranks, connect
from smlp.parallel.group import agree_on_sizes


class CountingGroup(DistributedGroup):
    """Counts the bytes of data that leave the rank."""

    def __init__(self, process_group) -> None:
        super().__init__(process_group)
        self.sent: dict[str, int] = {}

    def exchange(self, x, send_splits, receive_splits, name):
        if x.is_floating_point():
            rows = sum(send_splits) - send_splits[self.rank]
            self.sent[name] = self.sent.get(name, 0) + rows * x[:1].numel() * x.element_size()
        return super().exchange(x, send_splits, receive_splits, name)


def all_to_all() -> None:
    """Uneven and empty parts, every dtype; rows say where they come from and where they go."""
    group = DistributedGroup(dist.group.WORLD)
    rank, size = group.rank, group.size

    def rows_from_to(source: int, goal: int) -> int:
        return (source * 2 + goal) % 3  # some are 0

    send = [rows_from_to(rank, goal) for goal in range(size)]
    receive = [rows_from_to(source, rank) for source in range(size)]
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64):
        x = torch.tensor([[rank * 10 + goal] * 2 for goal in range(size) for _ in range(send[goal])], dtype=dtype)
        x = x.view(-1, 2).requires_grad_(dtype.is_floating_point)
        got = group.all_to_all(x, send, receive, "test")
        want = [source * 10 + rank for source in range(size) for _ in range(receive[source])]
        assert got.dtype == dtype and got[:, 0].tolist() == want
        if dtype.is_floating_point:
            factor = float(rank + 1)
            (got * factor).sum().backward()
            assert x.grad[:, 1].tolist() == [goal + 1 for goal in range(size) for _ in range(send[goal])]
    # nothing at all on any rank, and still part of the graph
    nothing = torch.zeros(0, 3, requires_grad=True)
    group.all_to_all(nothing, [0] * size, [0] * size, "test").sum().backward()
    assert nothing.grad.shape == (0, 3)
    counts = torch.arange(size * 2).view(size, 2) + 100 * rank
    got = group.exchange_counts(counts, "test")
    assert got.tolist() == [[100 * source + 2 * rank, 100 * source + 2 * rank + 1] for source in range(size)]
    assert group.all_reduce(torch.tensor(rank), "test", "max").item() == size - 1


def tokens_there_and_back(num_experts: int) -> None:
    """Experts that multiply by their global id + 1 show misrouting; places show who sits next to whom."""
    group = DistributedGroup(dist.group.WORLD)
    layout = ExpertLayout(num_experts, group.size, group.rank)
    exchange = TokenExchange(group, layout, "layer 0")
    num_tokens = [5, 0, 1, 3][group.rank]
    expert_N = torch.arange(num_tokens) * 3 % num_experts
    x = torch.arange(1.0, num_tokens + 1).double().unsqueeze(1) + 100 * group.rank
    x.requires_grad_()
    plan = RoutingPlan.from_experts(expert_N, num_experts)
    inputs, record = exchange.dispatch(x, plan)
    scale = torch.tensor([e + 1.0 for e in layout.expert_ids]).double()
    scale_R = scale.repeat_interleave(torch.tensor(record.counts)).unsqueeze(1)
    y = exchange.combine(inputs * scale_R, torch.full((num_tokens,), 2.0), record)
    want = 2 * (expert_N.unsqueeze(1) + 1.0).double()
    torch.testing.assert_close(y, x.detach() * want, rtol=0, atol=0)
    y.sum().backward()
    torch.testing.assert_close(x.grad, want, rtol=0, atol=0)
    arrived = inputs.detach().flatten()
    order = list(zip(scale_R.flatten().tolist(), arrived.tolist(), strict=True))
    assert order == sorted(order), "by expert, then source rank, then token"
    # two tokens in each sequence
    place = torch.stack([torch.arange(num_tokens) // 2, torch.arange(num_tokens) % 2], dim=1)
    places, num_seqs = exchange.dispatch_places(place, (num_tokens + 1) // 2, record)
    token_R = (arrived - 1).long() % 100
    sequences = list(zip((arrived.long() // 100).tolist(), (token_R // 2).tolist(), strict=True))
    ids = places[:, 0].tolist()
    assert len(set(zip(sequences, ids, strict=True))) == len(set(sequences)) == len(set(ids)), "sequences are mixed"
    assert all(0 <= i < num_seqs for i in ids)
    assert torch.equal(places[:, 1], token_R % 2)


def bytes_sent() -> dict:
    """What leaves each rank for known batches, in float32."""
    group = CountingGroup(dist.group.WORLD)
    layout = ExpertLayout(4, group.size, group.rank)
    x = torch.randn(3, 5, 8, requires_grad=True)
    features = FeatureExchange(group, layout, "sMoE")
    chunks, record = features.dispatch(x, 4)
    features.combine(chunks, record).sum().backward()
    tokens = TokenExchange(group, layout, "tMoE")
    plan = RoutingPlan.from_experts(torch.arange(15) % 4, 4)
    inputs, record = tokens.dispatch(x.flatten(0, 1), plan)
    tokens.combine(inputs, None, record).sum().backward()
    stays = plan.counts_E[list(layout.expert_ids)].sum().item()
    return {"sent": group.sent, "stays": stays}


def _model(ranks: Ranks, arch: str = "base", dtype: torch.dtype = torch.double):
    return rank_cases.build_both(arch, ranks, dtype)[1]


def other_precision() -> None:
    """Rank 1 runs the model in another precision."""
    ranks = connect(4, timeout=timedelta(seconds=20))
    model = _model(ranks, dtype=torch.float32 if ranks.layout.rank == 1 else torch.double)
    rank_cases.loss_of(model, rank_cases.batch(0, 0), seed=0)


def other_layer() -> None:
    """Rank 0 of all is one layer ahead."""
    ranks = connect(4, timeout=timedelta(seconds=20))
    name = "layer 5 (tMoE)" if ranks.layout.rank == 0 else "layer 3 (tMoE)"
    agree_on_sizes(ranks.experts, name, torch.zeros(2, 16), torch.zeros(ranks.experts.size, 3, dtype=torch.long))


def one_rank_fails(how: str, seconds: float) -> None:
    """Rank 1 dies, raises, stops for a long time, or leaves early, in the middle of training."""
    ranks = connect(4, timeout=timedelta(seconds=seconds))
    model = _model(ranks)
    for update in range(3):
        if update == 1 and ranks.layout.rank == 1:
            if how == "dies":
                os.kill(os.getpid(), 9)
            elif how == "raises":
                raise UserError("the batch of rank 1 cannot be read")
            elif how == "stops":
                time.sleep(2 * seconds)
                return
            elif how == "ends early":
                return
        rank_cases.train_one_update(
            model, ranks, [rank_cases.loss_of(model, rank_cases.batch(update, ranks.layout.rank), seed=update)]
        )


def second_derivatives() -> list[str]:
    """What autograd says to them, of an exchange."""
    group = DistributedGroup(dist.group.WORLD)
    rows = [2] * group.size
    x = torch.ones(2 * group.size, 3, requires_grad=True)
    exchanged = group.all_to_all(x, rows, rows, "test")
    (first,) = torch.autograd.grad((exchanged**3).sum(), x, create_graph=True)
    assert first.eq(3).all()
    try:
        (first**2).sum().backward()
    except RuntimeError as error:
        return [str(error)]
    return ["nothing"]


def checkpointed_exchange() -> list[str]:
    """A block in which only some ranks save a tensor after the exchange: they run the same collectives all the same."""
    group = CountingGroup(dist.group.WORLD)
    splits = [1] * group.size
    order = []

    def block(x):
        order.append("block")
        y = group.all_to_all(x.exp(), splits, splits, f"call {len(order)}")
        return y * y if group.rank == 1 else y + 0

    x = torch.full((group.size, 1), float(group.rank), dtype=torch.double, requires_grad=True)
    y = checkpoint(block, x, use_reentrant=False)
    (3 * y).sum().backward()
    slope = torch.full_like(x, 3.0)
    slope[1] = 6 * x[0].exp()
    torch.testing.assert_close(x.grad, slope.detach() * x.detach().exp())
    return list(group.sent)
