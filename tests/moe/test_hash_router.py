"""Hash routing: tables by hand and by bounds, and where they are kept."""

import pytest
import torch
from sparse_references import ScalingExperts

import smlp
from smlp.moe.layer import TokenMoE
from smlp.moe.routers import HashRouter
from smlp.moe.routers.hashed import balanced_table, random_table
from smlp.nn.state import ForwardContext


@pytest.mark.parametrize("num_experts", [1, 3, 8, 50, 64])
def test_a_random_table_is_even_and_depends_on_its_seed_alone(num_experts):
    torch.manual_seed(0)
    first = random_table(50, num_experts, seed=7)
    torch.rand(3)
    before = torch.get_rng_state()
    assert torch.equal(first, random_table(50, num_experts, seed=7))
    assert torch.equal(before, torch.get_rng_state())
    ids_E = torch.bincount(first, minlength=num_experts)
    assert ids_E.numel() == num_experts and ids_E.max() - ids_E.min() <= 1
    if num_experts > 1:
        assert not torch.equal(first, random_table(50, num_experts, seed=8))
        assert not torch.equal(first, torch.arange(50) % num_experts)


def test_the_seed_is_a_setting():
    tables = [smlp.build("hash_lm_tiny", hash_seed=seed).blocks[1].token_moe.router.table for seed in (3, 3, 4)]
    assert torch.equal(tables[0], tables[1]) and not torch.equal(tables[0], tables[2])
    assert torch.equal(tables[0], random_table(8192, 8, seed=3))


@pytest.mark.parametrize("settings", [{}, {"router": "base", "base_warmup": 0.5}, {"sparse_block": "gmlp_moe"}])
def test_each_layer_may_have_a_table_of_its_own(settings):
    def tables(**others):
        settings_of_all = {"num_sparse_layers": 3, "embed_dim": 16, "ffn_dim": 16, "vocab_size": 40, "max_tokens": 8}
        model = smlp.build("hash_lm_tiny", **settings_of_all, hash_seed=5, **settings, **others)
        return [block.token_moe.router.table.tolist() for block in model.blocks if hasattr(block, "token_moe")]

    expected = [random_table(40, 8, seed).tolist() for seed in (5, 6, 7)]
    assert tables() == [expected[0]] * 3
    assert tables(hash_tables="own") == expected


def test_balanced_tables_are_shared():
    with pytest.raises(smlp.UserError, match="hash_tables=own is for random tables: hash_kind=balanced"):
        smlp.build("hash_lm_tiny", hash_kind="balanced", hash_tables="own")


def test_a_balanced_table_by_hand():
    # by frequency: id 2 (9) to expert 0, id 0 (5) to 1, id 4 (5) to 2, id 1 (4) to 1 (5, as 2, but first), 3 (3) to 2
    assert balanced_table(torch.tensor([5, 4, 9, 3, 5]), 3).tolist() == [1, 1, 0, 2, 2]
    assert balanced_table(torch.tensor([1, 2, 3]), 1).tolist() == [0, 0, 0]
    assert balanced_table(torch.tensor([2, 1]), 4).tolist() == [0, 1], "more experts than ids"
    assert balanced_table(torch.zeros(6, dtype=torch.long), 3).bincount().tolist() == [2, 2, 2]


@pytest.mark.parametrize(("vocab_size", "num_experts"), [(1000, 8), (1000, 64), (300, 7), (5, 8)])
def test_a_balanced_table_of_zipf_frequencies_keeps_within_the_bound_of_its_deal(vocab_size, num_experts):
    frequencies = (1e6 / torch.arange(1, vocab_size + 1)).long()
    frequencies = frequencies[torch.randperm(vocab_size, generator=torch.Generator().manual_seed(1))]
    table = balanced_table(frequencies, num_experts)
    load_E = torch.zeros(num_experts, dtype=torch.long).index_add(0, table, frequencies)
    ideal = frequencies.sum().item() / num_experts
    for expert in range(num_experts):
        own = frequencies[table == expert]
        if own.numel():
            # the last id that it got went to the lightest expert, which had at most an equal share of the rest
            last = own.min().item()
            assert load_E[expert] <= (frequencies.sum().item() - last) / num_experts + last
    # the E most frequent ids went to E experts: the heaviest has one of them alone, or its last id is none of them
    ranked = frequencies.sort(descending=True).values.tolist() + [0] * num_experts
    assert load_E.max() <= max(ranked[0], ideal + ranked[num_experts])
    random_load_E = torch.zeros(num_experts, dtype=torch.long).index_add(
        0, random_table(vocab_size, num_experts, 1), frequencies
    )
    assert load_E.max() <= random_load_E.max()


def test_a_layer_follows_the_table_with_weight_one():
    router = HashRouter(vocab_size=6, num_experts=3, seed=1)
    router.balance(torch.tensor([5, 4, 9, 3, 5, 0]))  # experts 1, 1, 0, 2, 2, and 0 or 2 for the last
    layer, ids = TokenMoE(router, ScalingExperts(), "layer 1 (tMoE)"), torch.tensor([[0, 2, 4], [2, 3, 1]])
    x = torch.randn(2, 3, 4, requires_grad=True)
    update, aux_losses = layer(x, ForwardContext(tokens_Bn=ids))
    expected = x * torch.tensor([[2.0, 1, 3], [1, 3, 2]]).unsqueeze(2)
    torch.testing.assert_close(update, expected)
    assert aux_losses == {} and not list(router.parameters())


def test_tables_are_kept_in_checkpoints():
    narrow = {"vocab_size": 40, "max_tokens": 8, "embed_dim": 16, "ffn_dim": 16}
    trained = smlp.build("hash_lm_tiny", **narrow)
    sparse = [block.token_moe.router for block in trained.blocks if hasattr(block, "token_moe")]
    for i, router in enumerate(sparse):
        router.balance(torch.randint(0, 9, (40,), generator=torch.Generator().manual_seed(i)))
    assert len(sparse) == 2 and not torch.equal(sparse[0].table, sparse[1].table)
    loaded = smlp.build("hash_lm_tiny", hash_seed=99, **narrow)
    loaded.load_state_dict(trained.state_dict())
    tokens = torch.randint(2, 40, (3, 8), generator=torch.Generator().manual_seed(0))
    assert torch.equal(loaded.eval()(tokens).logits, trained.eval()(tokens).logits)
    restored = [block.token_moe.router.table for block in loaded.blocks if hasattr(block, "token_moe")]
    assert all(torch.equal(table, router.table) for table, router in zip(restored, sparse, strict=True))
    assert loaded.bfloat16().blocks[1].token_moe.router.table.dtype == torch.long


def test_frequencies_of_another_vocabulary_are_refused_with_both_numbers():
    with pytest.raises(smlp.UserError, match=r"\b5\b.*\b6\b"):
        HashRouter(6, 3, seed=1).balance(torch.ones(5))


def test_a_balanced_table_that_never_came_is_refused():
    model = smlp.build("hash_lm_tiny", hash_kind="balanced", vocab_size=20, max_tokens=8, embed_dim=16, ffn_dim=16)
    with pytest.raises(smlp.UserError, match="hash_kind=balanced has no table"):
        model(torch.randint(2, 20, (1, 8)))
    whole = smlp.build("hash_lm_tiny", vocab_size=20, max_tokens=8, embed_dim=16, ffn_dim=16)
    model.load_state_dict(whole.state_dict())
    assert model(torch.randint(2, 20, (1, 8))).logits.isfinite().all()
