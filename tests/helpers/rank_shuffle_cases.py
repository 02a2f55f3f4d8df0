"""What ranks do in the tests of tokens mixed over ranks: functions that run on every rank, and assert there."""

from __future__ import annotations

import rank_cases
import torch
import torch.distributed as dist

from smlp.moe.exchange import TokenShuffle
from smlp.nn.state import ForwardContext
from smlp.parallel import connect


def there_and_back(num_tokens: list[int]) -> list[list[int]]:
    """Rows come back to their places, and their gradients; returns for three draws the tokens that came from each
    rank."""
    ranks = connect(2 * len(num_tokens))
    rank, shuffle = ranks.layout.rank, TokenShuffle(ranks.experts, ranks.layout, "layer 1 (tMoE)")
    torch.manual_seed(rank)
    own = num_tokens[rank]
    x_NH = torch.stack([torch.full((own,), float(rank)), torch.arange(own).float()], dim=1).requires_grad_()
    came, orders = [], []
    for _ in range(3):
        mixed, record = shuffle.out(x_NH)
        came.append([int((mixed[:, 0] == source).sum()) for source in range(len(num_tokens))])
        orders.append(record.token_N.tolist())
        back = shuffle.back(mixed * (mixed[:, :1].detach() + 2), record)
        assert torch.equal(back, x_NH * (rank + 2))
        (grad,) = torch.autograd.grad(back.sum(), x_NH)
        assert torch.equal(grad, torch.full_like(grad, rank + 2))
    assert own < 4 or len({tuple(order) for order in orders}) > 1
    return came


def trains_with_mixed_tokens(group_size: int) -> list[float]:
    """Loss without mixing, with it, and with it again; every expert gets its share of all tokens of the group."""
    ranks = connect(4, group_size)
    losses = []
    for shuffled in (False, True, True):
        _, model = rank_cases.build_both(
            "base", ranks, base_shuffle=shuffled, checkpoint_activations=shuffled, dropout=0.0
        )
        model.train()
        ids = torch.randint(2, 30, (2, 10), generator=torch.Generator().manual_seed(ranks.layout.rank))
        torch.manual_seed(5 + ranks.layout.rank)
        context = ForwardContext(observe=True)
        model(ids, context=context)
        loads = sum(observation.plan.counts_E for observation in context.observations.values())
        dist.all_reduce(loads)
        assert loads.tolist() == [2 * 20 * ranks.layout.world_size // 4] * 4
        loss = rank_cases.loss_of(model, ids, seed=ranks.layout.rank)
        norm = rank_cases.train_one_update(model, ranks, [loss])
        dist.all_reduce(loss.detach())
        losses.append([float(loss), float(norm)])
    return losses
