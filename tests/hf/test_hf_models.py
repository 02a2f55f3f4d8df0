"""Models of transformers: logits, padding, losses and generation are those of this package."""

import copy
import json
import math
import shutil
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tiny_decoders import VARIANTS, make, random_tokens

import smlp
from smlp.config import flatten
from smlp.evaluation.leak import randomise
from smlp.hf import SmlpCache, SmlpConfig, SmlpEncoderConfig, SmlpForCausalLM, SmlpForMaskedLM

# isort: split
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, DynamicCache

WRITE = {"do_sample": False, "max_new_tokens": 5, "suppress_tokens": [0, 1, 3], "eos_token_id": None}


def wrapped(core):
    """A model of transformers with the weights of a decoder or an encoder."""
    is_encoder = core.config.is_bidirectional
    config = (SmlpEncoderConfig if is_encoder else SmlpConfig)(**flatten(core.config))
    model = (SmlpForMaskedLM if is_encoder else SmlpForCausalLM)(config)
    model.core.load_state_dict(core.state_dict())
    return model.eval().to(core.embedding.weight.dtype)


def encoder(arch="gmlp_mlm_tiny", **settings):
    small = {"vocab_size": 40, "max_tokens": 12, "embed_dim": 16, "ffn_dim": 24, "num_dense_layers": 2, "num_heads": 2}
    return randomise(smlp.build(arch, **{**small, **settings})).eval()


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request):
    core = make(request.param)
    return core, wrapped(core)


@torch.no_grad()
def test_a_saved_model_is_read_again(pair, tmp_path):
    """Bit by bit, with what no file holds: from_pretrained builds the model without memory first."""
    core, model = pair
    model.save_pretrained(tmp_path)
    found = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(found) is SmlpForCausalLM and flatten(found.core.config) == flatten(core.config)
    tokens, weights = random_tokens(2, 12), core.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in found.core.state_dict().items())
    # products with one row depend on where the weights lie, in the last digit
    torch.testing.assert_close(found(tokens).logits, core(tokens).logits, rtol=1e-5, atol=1e-5)
    assert found.get_input_embeddings() is found.core.embedding and not found.training
    assert [name for name, _ in found.named_parameters() if "embedding" in name] == ["core.embedding.weight"]
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    want = copy.deepcopy(core).bfloat16()
    assert half.dtype == torch.bfloat16 and torch.equal(half(tokens).logits, want(tokens).logits)


@torch.no_grad()
def test_generation_does_not_depend_on_the_cache_or_on_padding(pair):
    """Greedy, sampled and searched; beams are reordered, and each sequence of a padded batch begins at position 0."""
    _, model = pair
    prompts = random_tokens(2, 7)
    padded, mask = prompts.clone(), torch.ones_like(prompts)
    padded[0, :2], mask[0, :2] = 1, 0
    kinds = ({}, {"num_beams": 3}, {"do_sample": True, "top_k": 0})
    for kind in kinds:
        written = []
        for use_cache in (True, False):
            torch.manual_seed(3)
            asked = {**WRITE, **kind, "use_cache": use_cache}
            written.append(model.generate(padded, attention_mask=mask, **asked))
        assert torch.equal(*written), kind
        if not kind.get("do_sample"):
            for row, first in ((0, 2), (1, 0)):
                alone = model.generate(prompts[row : row + 1, first:], **{**WRITE, **kind})
                assert torch.equal(written[0][row, first:], alone[0]), kind


def test_padding_on_either_side_changes_nothing(pair):
    """Outputs and gradients, in float64, against each sequence alone."""
    core, _ = pair
    core = copy.deepcopy(core).double()
    model, alone = wrapped(core), wrapped(core)
    tokens = random_tokens(3, 9)
    mask = torch.ones_like(tokens)
    mask[0, :4], mask[1, 6:], mask[2, 0], mask[2, 8] = 0, 0, 0, 0
    logits = model(tokens, attention_mask=mask, use_cache=False).logits
    total = 0.0
    for row in range(3):
        kept = mask[row].bool()
        own = alone(tokens[row : row + 1, kept], use_cache=False).logits
        torch.testing.assert_close(logits[row, kept], own[0])
        total = total + own.square().mean()
    sum(logits[row, mask[row].bool()].square().mean() for row in range(3)).backward()
    total.backward()
    for (name, ours), (_, theirs) in zip(model.named_parameters(), alone.named_parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, msg=name)


def test_the_loss_is_that_of_training(pair):
    """Next tokens, without -100 and the positions that only choose experts, plus auxiliary losses in training."""
    core, model = pair
    tokens, labels = random_tokens(2, 10), random_tokens(2, 10)
    labels[0, 4:6] = -100
    prefix = core.config.prefix_tokens
    with torch.no_grad():
        targets = labels[:, 1 + prefix :].flatten()
        want = F.cross_entropy(core(tokens).logits[:, prefix:-1].flatten(0, 1), targets)
        found = model(tokens, labels=labels)
        torch.testing.assert_close(found.loss, want)
        assert found.past_key_values is None
        share = model(tokens, labels=labels, num_items_in_batch=torch.tensor(100)).loss
        torch.testing.assert_close(share, want * (labels[:, 1:] != -100).sum() / 100)  # as Trainer counts them
        shifted = torch.cat([torch.ones(2, 1, dtype=torch.long), tokens], 1)
        mask = (torch.arange(11) > 0).expand(2, -1).long()
        padded = model(shifted, attention_mask=mask, labels=torch.cat([labels[:, :1], labels], 1))
        torch.testing.assert_close(padded.loss, want)
        training = copy.deepcopy(model).train()
        torch.manual_seed(0)
        found = training(tokens, labels=labels)
        torch.manual_seed(0)
        output = training.core(tokens)
        aux_losses = sum(output.aux_losses.values())
        likelihood = F.cross_entropy(output.logits[:, prefix:-1].flatten(0, 1), targets)
        torch.testing.assert_close(found.loss, likelihood + aux_losses)


@pytest.mark.parametrize("arch", ["gmlp_mlm_tiny", "bert_mlm_tiny", "bert_mlm_rel_tiny", "amlp_mlm_tiny"])
@torch.no_grad()
def test_an_encoder_is_a_masked_language_model(arch, tmp_path):
    core = encoder(arch)
    wrapped(core).save_pretrained(tmp_path)
    model = AutoModelForMaskedLM.from_pretrained(tmp_path)
    tokens, labels = random_tokens(2, 9), torch.full((2, 9), -100)
    assert torch.equal(model(tokens).logits, core(tokens))
    mask = torch.ones_like(tokens)
    mask[0, 6:] = 0
    padded = model(tokens, attention_mask=mask).logits
    torch.testing.assert_close(padded[0, :6], core(tokens[:1, :6])[0])
    labels[1, 3] = 7
    torch.testing.assert_close(model(tokens, labels=labels).loss, -core(tokens)[1, 3].log_softmax(0)[7])


def test_blocks_are_recomputed_if_asked():
    core = make("smlp").train()
    model = wrapped(core).train()
    model.gradient_checkpointing_enable()
    assert model.core.config.checkpoint_activations
    tokens = random_tokens(2, 9)
    model(tokens, labels=tokens).loss.backward()
    want = wrapped(core).train()
    want(tokens, labels=tokens).loss.backward()
    for ours, theirs in zip(model.parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    model.gradient_checkpointing_disable()
    assert not model.core.config.checkpoint_activations


@pytest.fixture(scope="module")
def plain():
    return wrapped(make("gmlp"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"inputs_embeds": torch.ones(1)}, "does not take inputs_embeds"),
        ({"output_hidden_states": True}, "does not take output_hidden_states"),
        ({"attention_mask": torch.tensor([[1, 0, 1, 1]])}, "zeros at the padding before or after them only"),
        ({"attention_mask": torch.tensor([[0, 0, 0, 0]])}, "at least one"),
        ({"attention_mask": torch.tensor([[-1e9, -1e9, 0.0, 0.0]])}, "must have ones at the tokens"),
        ({"attention_mask": torch.full((1, 4), -1e9)}, "must have ones at the tokens"),
        ({"attention_mask": torch.ones(1, 3)}, "a column for each of the 4 places"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 0]]), "use_cache": True}, "pad on the left"),
        ({"past_key_values": DynamicCache()}, "must be a SmlpCache, got DynamicCache"),
        ({"past_key_values": SmlpCache(None, 12), "labels": torch.ones(1, 4)}, "labels are for whole sequences"),
    ],
)
def test_what_cannot_be_done_is_refused(plain, options, words):
    with pytest.raises(ValueError, match=words):
        plain(random_tokens(1, 4), **options)


def test_what_a_model_cannot_write_is_refused(plain):
    with pytest.raises(ValueError, match="needs at least 4: its first ones only choose experts"):
        wrapped(make("partial")).generate(random_tokens(1, 3), **WRITE)
    leaky, tokens = wrapped(make("partial", feature_routing="leaky")), random_tokens(1, 5)
    with pytest.raises(ValueError, match="leaky reads the tokens that it predicts"):
        leaky.generate(tokens, **WRITE)
    assert torch.equal(leaky(tokens).logits, leaky.core(tokens).logits)
    with pytest.raises(ValueError, match="cannot change its vocabulary from 40 to 50"):
        plain.resize_token_embeddings(50)
    with pytest.raises(smlp.UserError, match="of 13 tokens is longer than the model's context of max_tokens=12"):
        plain(random_tokens(1, 13))
    with pytest.raises(ValueError, match=r"a prompt of 13 tokens .* is longer than the model's context of 12 tokens"):
        plain.generate(random_tokens(1, 13), max_new_tokens=1)


def test_texts_end_where_the_context_does(plain):
    """The last token needs no position."""
    tokens = random_tokens(1, 5)
    tokens[:, 0] = 2  # the start symbol, which many calls give as padding
    for more in ({}, {"pad_token_id": 2}):
        options = {**WRITE, "max_new_tokens": 256, "attention_mask": torch.ones_like(tokens), **more}
        assert plain.generate(tokens, **options).shape == (1, 13)


@pytest.mark.parametrize("options", [{"max_new_tokens": 2}, {"max_new_tokens": 256}, {"max_new_tokens": None}])
def test_padding_before_all_prompts_takes_no_room(plain, options):
    """As a tokenizer writes it that pads to a fixed length."""
    tokens, options = random_tokens(2, 10), {**WRITE, **options}
    tokens[1, 0] = 1  # the shorter prompt's own
    alone = plain.generate(tokens, attention_mask=(tokens != 1).long(), **options)
    padded = torch.cat([torch.ones(2, 6, dtype=torch.long), tokens], 1)
    found = plain.generate(padded, attention_mask=(padded != 1).long(), **options)
    assert alone.size(1) > 10 and torch.equal(found[:, 6:], alone)


def test_the_mask_says_what_is_padding_whatever_the_ids(plain):
    options, tokens = {**WRITE, "max_new_tokens": 256}, random_tokens(1, 5)
    alone = plain.generate(tokens, **options)
    assert alone.size(1) == 13
    padded = torch.cat([torch.full((1, 12), 2), tokens], 1)  # as with the end symbol for padding
    mask = torch.ones_like(padded)
    mask[:, :12] = 0
    assert torch.equal(plain.generate(padded, attention_mask=mask, **options)[:, 12:], alone)
    tokens[:, :3] = 1  # tokens, as the mask says
    assert plain.generate(tokens, attention_mask=torch.ones_like(tokens), **options).size(1) == 13


def test_masks_that_do_not_fit_are_refused(plain):
    tokens = random_tokens(2, 6)
    mask = torch.ones_like(tokens)
    mask[1, 0] = 0
    for rows in (mask[:1], torch.cat([mask, mask])):
        with pytest.raises(ValueError, match="a row for each of the 2 sequences and a column for each of the 6 places"):
            plain(tokens, attention_mask=rows)
    with pytest.raises(ValueError, match=r"input_ids must be \(B, n\), got \(6,\)"):
        plain(tokens[0])
    whole = torch.ones(2, 7, dtype=torch.long)
    padded = torch.cat([mask, whole[:, :1]], 1)
    for first, after in ((None, padded), (mask, whole)):
        cache = plain(tokens, attention_mask=first).past_key_values
        with pytest.raises(ValueError, match="other padding before the sequences than the cache was made with"):
            plain(tokens[:, :1], attention_mask=after, past_key_values=cache)
    with pytest.raises(ValueError, match="the cache is of 2 sequences, and this batch has 1"):
        plain(tokens[:1, :1], attention_mask=whole[:1], past_key_values=plain(tokens).past_key_values)


def test_auxiliary_losses_do_not_depend_on_the_cache():
    model, tokens = copy.deepcopy(wrapped(make("switch"))).train(), random_tokens(2, 6)
    found = [model(tokens, labels=tokens, use_cache=use_cache) for use_cache in (True, False)]
    assert found[0].aux_loss == found[1].aux_loss != 0 and torch.allclose(found[0].loss, found[1].loss)
    mask = torch.ones_like(tokens)
    mask[1, 0] = 0
    with pytest.raises(ValueError, match="padded labels in training need use_cache=False"):
        model(tokens, attention_mask=mask, labels=tokens, use_cache=True)
    dense = wrapped(make("gmlp")).train()  # has no losses of routers
    assert math.isfinite(dense(tokens, attention_mask=mask, labels=tokens, use_cache=True).loss)


def test_a_cache_that_is_reset_knows_no_padding(plain):
    tokens = random_tokens(2, 6)
    mask = torch.ones_like(tokens)
    mask[1, 0] = 0
    cache = plain(tokens, attention_mask=mask).past_key_values
    with pytest.raises(ValueError, match="the cache is of 2 sequences, and this batch has 1"):
        plain(tokens[:1, :1], past_key_values=cache)
    cache.reset()
    torch.testing.assert_close(plain(tokens, past_key_values=cache).logits, plain(tokens).logits)


def test_a_trainer_that_smooths_labels_shifts_them(plain, tmp_path):
    """Trainer knows models whose labels are shifted by a list of names."""
    from transformers import Trainer, TrainingArguments

    options = TrainingArguments(str(tmp_path), label_smoothing_factor=0.1, use_cpu=True, report_to=[])
    tokens = random_tokens(2, 6)
    loss = Trainer(copy.deepcopy(plain), options).compute_loss(plain, {"input_ids": tokens, "labels": tokens.clone()})
    log_probs = plain(tokens).logits[:, :-1].log_softmax(-1)
    of_labels = log_probs.gather(2, tokens[:, 1:, None]).mean()
    torch.testing.assert_close(loss, -0.9 * of_labels - 0.1 * log_probs.mean())


def test_a_trainer_reports_the_loss_of_the_positions_that_count(pair, tmp_path):
    """Trainer counts labels of padding's first token and of positions that only choose experts, too."""
    from transformers import Trainer, TrainingArguments

    _, model = pair
    options = TrainingArguments(str(tmp_path), per_device_eval_batch_size=4, use_cpu=True, report_to=[])
    rows = random_tokens(4, 9)
    mask = torch.ones_like(rows)
    mask[0, :4], mask[1, :2] = 0, 0
    labels = rows.masked_fill(mask == 0, -100)
    batch = {"input_ids": rows, "attention_mask": mask, "labels": labels}
    with torch.no_grad():
        want = model(**batch, use_cache=False).loss
    data = [{name: value[row] for name, value in batch.items()} for row in range(4)]
    found = Trainer(copy.deepcopy(model), options, eval_dataset=data).evaluate()["eval_loss"]
    assert found == pytest.approx(want.item(), rel=1e-5)


def test_a_folder_that_lacks_weights_is_refused(plain, tmp_path):
    state = {name: tensor for name, tensor in plain.state_dict().items() if "norm.bias" not in name}
    plain.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ValueError, match=r"lacks \d+ weights of the model, such as core\..*norm.bias"):
        SmlpForCausalLM.from_pretrained(tmp_path)


def test_weights_of_another_shape_are_refused(plain, tmp_path):
    """They would be what the memory held."""
    plain.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"core\.\S+ has shape \(.*12.*\) in the folder, and \(.*16.*\) in the model"):
        SmlpForCausalLM.from_pretrained(tmp_path, max_tokens=16, ignore_mismatched_sizes=True)


@pytest.mark.parametrize("shard", ["1GB", "8KB"])
def test_sizes_that_no_weight_has_are_refused_before_anything_is_built(plain, tmp_path, monkeypatch, shard):
    plain.save_pretrained(tmp_path, max_shard_size=shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "8KB")
    SmlpForCausalLM.from_pretrained(tmp_path)
    monkeypatch.setattr("smlp.hf.modeling.model_of", lambda config: pytest.fail("it was built"))
    settings = json.loads((tmp_path / "config.json").read_text())
    rows, blocks = settings["vocab_size"], settings["num_dense_layers"] + settings["num_sparse_layers"]
    for name, value, said in (
        ("max_tokens", 10**9, r"1,000,000,000 positions: its tensors have at most 1,048,576"),
        ("max_position_embeddings", 10**9, r"1,000,000,000 positions: its tensors have at most 1,048,576"),
        ("vocab_size", 10**8, rf"100,000,000 symbols: its tensors have at most {rows}"),
        (
            "num_dense_layers",
            9000,
            rf"{9000 + settings['num_sparse_layers']:,} blocks: its tensors have at most {blocks}",
        ),
    ):
        changed = dict(settings)
        if name == "max_position_embeddings":
            del changed["max_tokens"]
        (tmp_path / "config.json").write_text(json.dumps({**changed, name: value}))
        for load in (SmlpForCausalLM, AutoModelForCausalLM):
            with pytest.raises(smlp.UserError, match=said):
                load.from_pretrained(tmp_path)
    for file in tmp_path.glob("*.safetensors*"):
        file.unlink()
    save_file({}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(smlp.UserError, match=r"blocks: its tensors have at most 0"):
        SmlpForCausalLM.from_pretrained(tmp_path)
    monkeypatch.undo()
    SmlpForCausalLM(SmlpConfig(**{**settings, "num_dense_layers": 3}))  # a model of one's own may have any size


@pytest.mark.parametrize("name", ["num_labels", "foo"])
def test_labels_that_no_model_has_are_not_named_by_the_million(plain, tmp_path, name):
    plain.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    for count, refusal in (
        (7, nullcontext()),
        (10**7, pytest.raises(smlp.UserError, match="at most 65,536, got 10,0")),
    ):
        other = {"attribute_map": {"foo": "num_labels"}, name: count}
        (tmp_path / "config.json").write_text(json.dumps({**settings, **other}))
        with refusal:
            assert SmlpConfig.from_pretrained(tmp_path).num_labels == count


def test_weights_are_read_from_the_files_that_are_looked_at(plain, tmp_path):
    plain.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    shutil.copyfile(tmp_path / "model.safetensors", tmp_path / "other.safetensors")
    name = {"transformers_weights": "other.safetensors"}
    for is_there in (True, False):
        for way in (name, {"attribute_map": {"transformers_weights": "foo"}, "foo": "other.safetensors"}):
            (tmp_path / "config.json").write_text(json.dumps({**settings, **way}))
            with pytest.raises(smlp.UserError, match=r"transformers_weights = 'other\.safetensors': remove it"):
                SmlpForCausalLM.from_pretrained(tmp_path)
        if is_there:
            (tmp_path / "model.safetensors").unlink()
    (tmp_path / "config.json").write_text(json.dumps(settings))
    torch.save(plain.state_dict(), tmp_path / "pytorch_model.bin")
    for options in ({}, {"use_safetensors": None}):
        with pytest.raises(OSError, match=r"no file named model\.safetensors"):
            SmlpForCausalLM.from_pretrained(tmp_path, **options)


def test_tensors_that_claim_any_size_or_have_other_names_decide_nothing(plain, tmp_path):
    """As those without elements, and a plug-in's own embedding, whose name comes before ours."""
    plain.save_pretrained(tmp_path, variant="half")
    path, state = tmp_path / "model.half.safetensors", plain.state_dict()
    state |= {"core.blocks.0.a_embedding.weight": torch.zeros(3, 4), "zz": torch.zeros(0, 10**9)}
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, path, metadata={"format": "pt"})
    SmlpForCausalLM.from_pretrained(tmp_path, variant="half")
    with pytest.raises(smlp.UserError, match=r"2,000,000 positions: its tensors have at most 1,048,576"):
        SmlpForCausalLM.from_pretrained(tmp_path, variant="half", max_tokens=2_000_000)
    other = {f"new.{name}": tensor for name, tensor in state.items() if name.startswith("core.")}
    save_file({name: tensor.contiguous() for name, tensor in other.items()}, path, metadata={"format": "pt"})
    SmlpForCausalLM.from_pretrained(tmp_path, variant="half", key_mapping={r"^new\.": ""})


def test_an_upload_has_all_files_of_the_saved_folder(plain, tmp_path, monkeypatch):
    uploaded = []
    hub = SimpleNamespace(
        create_repo=lambda *_, **more: SimpleNamespace(repo_id="a/b"),
        create_commit=lambda **more: uploaded.extend(more["operations"]),
    )
    for module in ("transformers.modeling_utils", "transformers.utils.hub"):
        monkeypatch.setattr(f"{module}.hf_api", lambda: hub)
    card = SimpleNamespace(save=lambda path: None)
    monkeypatch.setattr("transformers.modeling_utils.create_and_tag_model_card", lambda *_, **more: card)
    plain.save_pretrained(tmp_path, push_to_hub=True, repo_id="a/b")
    files = {file.name for file in tmp_path.iterdir()}
    assert "modeling_smlp.py" in files and {file.path_in_repo for file in uploaded} == files


def test_weights_on_disk_are_refused(plain, tmp_path):
    plain.save_pretrained(tmp_path / "model")
    parts = (*plain.core.named_children(), *plain.core.named_buffers(recurse=False))
    places = {f"core.{name}": "disk" if name == "blocks" else "cpu" for name, _ in parts}
    with pytest.raises(ValueError, match="device_map leaves weights on disk or on meta"):
        SmlpForCausalLM.from_pretrained(tmp_path / "model", device_map=places, offload_folder=tmp_path / "weights")
    SmlpForCausalLM.from_pretrained(tmp_path / "model", device_map="auto")


def test_a_cache_can_be_repeated_and_chosen_from(plain):
    tokens = random_tokens(2, 6)
    mask = torch.ones_like(tokens)
    mask[1, 0] = 0
    with torch.no_grad():
        for attention_mask in (None, mask):
            full = plain(tokens, attention_mask=attention_mask, use_cache=False).logits
            given = None if attention_mask is None else attention_mask[:, :5]
            cache = plain(tokens[:, :5], attention_mask=given).past_key_values
            assert (cache.get_seq_length(), cache.get_max_length(), cache.batch_size) == (5, 12, 2)
            cache.batch_repeat_interleave(2)
            cache.batch_select_indices(torch.tensor([3, 0]))
            found = plain(tokens[[1, 0], 5:], past_key_values=copy.deepcopy(cache)).logits
            torch.testing.assert_close(found[:, 0], full[[1, 0], 5])
            with pytest.raises(NotImplementedError, match="cannot drop its last positions"):
                cache.crop(1)
            cache.reset()
            again = plain(tokens[[1, 0], :5], past_key_values=cache, logits_to_keep=1).logits
            if attention_mask is None:
                torch.testing.assert_close(again[:, 0], full[[1, 0], 4])
