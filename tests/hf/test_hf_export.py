"""``smlp export --hf`` and ``smlp checkpoint import``: folders for transformers, and back."""

import ast
import json
import os
import re
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from running import USER_DIR, run_python
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tiny_checkpoints import SMALL, WORDS, write_checkpoint

import smlp
import smlp.hf
from smlp.checkpoint.hf_folder import ALIASES
from smlp.checkpoint.opened import open_checkpoint
from smlp.cli.main import main
from smlp.files import write_whole

# isort: split
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    pipeline,
)

PROMPTS = ["the s1 v1", "a", "the o1 a and v2 s2"]


def command(*words):
    return main([str(word) for word in words])


def exported(path, folder, *words):
    assert command("export", path, folder, "--hf", *words) == 0
    return folder


@pytest.fixture(scope="module", params=["smlp_tiny", "switch_lm_tiny", "gmlp_moe_tiny", "dense_lm_tiny"])
def model(request, tmp_path_factory):
    """A checkpoint and its folder."""
    folder = tmp_path_factory.mktemp(request.param)
    path, _ = write_checkpoint(folder / "ours", WORDS, request.param, 30)
    return path, exported(path, folder / "hf")


@torch.no_grad()
def test_logits_and_texts_are_those_of_the_checkpoint(model):
    path, folder = model
    lm, tokenizer = smlp.load_pretrained(path), AutoTokenizer.from_pretrained(folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.randint(2, 14, (3, 30), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(theirs(tokens).logits, lm(tokens).logits, rtol=0, atol=1e-5)
    batch = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    for settings, options in (
        ({"greedy": True, "stop_at_eos": True}, {"do_sample": False}),
        ({"beam": 3, "length_penalty": 0.0}, {"num_beams": 3, "length_penalty": 0.0, "early_stopping": True}),
    ):
        written = theirs.generate(**batch, max_new_tokens=20, **options)[:, batch["input_ids"].size(1) :]
        for row, (best, *_) in zip(written.tolist(), lm.continuations(PROMPTS, 20, **settings), strict=True):
            if best.finish == "end" or "beam" not in settings:  # transformers forces no end at the last token
                assert row[: len(best.tokens)] == best.tokens, settings
    writer = pipeline("text-generation", model=theirs, tokenizer=tokenizer)
    found = writer(PROMPTS[0], max_new_tokens=12, do_sample=False)[0]["generated_text"]
    assert found == PROMPTS[0] + lm.generate(PROMPTS[0], 12, greedy=True, stop_at_eos=True).rstrip("\n")


def test_a_folder_is_whole(model):
    path, folder = model
    names = {file.name for file in folder.iterdir()}
    assert names == {
        *("README.md", "config.json", "dict.txt", "generation_config.json", "model.safetensors", "modeling_smlp.py"),
        *("tokenizer.json", "tokenizer_config.json"),
    }
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "smlp" and config["arch"] == open_checkpoint(path).arch
    assert json.loads((folder / "generation_config.json").read_text())["suppress_tokens"] == [0, 1, 3, 13]
    card = (folder / "README.md").read_text()
    assert "million multiply-adds" in card and "at most 30 tokens" in card and "`data`" in card


def test_experts_in_parts_are_merged_and_large_files_split(tmp_path, capsys):
    path, _ = write_checkpoint(tmp_path / "ours", WORDS, "base_lm_tiny", 12, num_experts=4)
    parts = tmp_path / "parts" / "checkpoint_last.pt"
    assert command("checkpoint", "split", path, "-o", parts, "--parts", 2) == 0
    shutil.copy(path.parent / "dict.txt", parts.parent)
    folder = exported(parts, tmp_path / "hf", "--max-shard-size", "0.005MB")
    assert (folder / "model.safetensors.index.json").is_file() and len(list(folder.glob("model-0*"))) > 2
    back = tmp_path / "back" / "checkpoint.pt"
    assert command("checkpoint", "import", folder, "-o", back) == 0
    said = capsys.readouterr().out
    assert "base_lm_tiny" in said and "layout      one file\n" in said  # of any number of ranks
    tokens = torch.randint(2, 14, (2, 12))
    ours, again = smlp.load_pretrained(path), smlp.load_pretrained(back)
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(again(tokens).logits, ours(tokens).logits)
    torch.testing.assert_close(theirs(tokens).logits, ours(tokens).logits)
    assert (back.parent / "dict.txt").read_bytes() == (path.parent / "dict.txt").read_bytes()
    (folder / "dict.txt").unlink()
    os.mkfifo(folder / "dict.txt")
    assert command("checkpoint", "import", folder, "-o", tmp_path / "piped" / "checkpoint.pt") == 1
    assert f"{folder / 'dict.txt'} is not a regular file but a named pipe" in capsys.readouterr().err


def test_the_card_says_what_the_checkpoint_records(tmp_path):
    path, _ = write_checkpoint(tmp_path / "ours", WORDS, "smlp_partial_tiny", 30)
    state = torch.load(path, weights_only=True)
    state["cfg"] |= {
        "dataset": {"batch_size": 4},
        "optimization": {"update_freq": [1, 2]},  # in the first epoch, and later
        "distributed_training": {"distributed_world_size": 1},
    }
    state["optimizer_history"] = [{"num_updates": 100}]
    state["extra_state"] = {"best": 3.0}
    torch.save(state, path)
    card = (exported(path, tmp_path / "hf") / "README.md").read_text()
    assert "At most 24,000 tokens were read (4 sequences on each of 1 ranks, 2 times for each update)" in card
    assert "perplexity of the training run was 8.00 per token (3.000 bits)" in card
    assert "The first 6 positions only choose experts" in card and "Updates: 100." in card
    state["cfg"]["task"]["data"] = ".:data-bin/.."
    torch.save({**state, "extra_state": {"best": 1500.0}}, path)
    card = (exported(path, tmp_path / 'a "b" \\ä') / "README.md").read_text()
    assert "The training run diverged." in card and "Data: not recorded." in card
    code = ast.parse(re.search(r"```python\n(.*?)```", card, re.DOTALL)[1])
    assert {node.value for node in ast.walk(code) if isinstance(node, ast.Constant)} >= {'a "b" \\ä'}


@torch.no_grad()
def test_an_encoder_fills_masks_and_comes_back(tmp_path, capsys):
    path, core = write_checkpoint(tmp_path / "ours", WORDS, "bert_mlm_tiny", 12, num_sparse_layers=0, num_heads=2)
    state = torch.load(path, weights_only=True)
    core.add_sentence_head("topic", 3)
    state["model"] = {f"encoder.core.{name}": tensor for name, tensor in core.state_dict().items()}
    torch.save(state, path)
    folder = exported(path, tmp_path / "hf")
    assert (
        "left out, because a masked language model has no other heads: sentence_heads.topic" in capsys.readouterr().out
    )
    ours, text = smlp.load_pretrained(path), "the s1 <mask> a"
    theirs = AutoModelForMaskedLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer(text)["input_ids"] == ours.tokenize(text)
    found = pipeline("fill-mask", model=theirs, tokenizer=tokenizer)(text)
    want = ours.fill(text)[0]
    assert [one["token"] for one in found] == [one.token for one in want]
    assert [one["score"] for one in found] == pytest.approx([one.probability for one in want], abs=1e-6)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({name: config[name] for name in config if name != "arch"}))
    assert command("checkpoint", "import", folder, "-o", tmp_path / "back" / "checkpoint.pt") == 0
    assert open_checkpoint(tmp_path / "back" / "checkpoint.pt").arch == "smlp_encoder"  # a name that fairseq knows
    again = smlp.load_pretrained(tmp_path / "back" / "checkpoint.pt")
    assert torch.equal(again(torch.tensor([[0, 5, 2]])), ours(torch.tensor([[0, 5, 2]])))


def test_training_goes_on_from_a_folder(tiny_data, run_fairseq_many, tmp_path):
    """An update at a learning rate of almost 0 leaves the weights of the folder, fine-tuned or resumed."""
    words = [line.split()[0] for line in (tiny_data / "dict.txt").read_text().splitlines()]
    path, decoder = write_checkpoint(tmp_path / "ours", words, "switch_lm_tiny", 32, num_heads=2)
    back = tmp_path / "back" / "checkpoint.pt"
    assert command("checkpoint", "import", exported(path, tmp_path / "hf"), "-o", back) == 0
    sizes = {name: getattr(decoder.config, name) for name in ("num_heads", *SMALL)}
    args = [
        *(tiny_data, "--user-dir", USER_DIR, "--task", "language_modeling", "--arch", "switch_lm_tiny"),
        *(word for name, size in sizes.items() for word in (f"--{name.replace('_', '-')}", size)),
        *("--tokens-per-sample", 32, "--batch-size", 4, "--optimizer", "adam", "--lr", 1e-20, "--max-update", 1),
        *("--num-workers", 0),
    ]
    resets = [f"--reset-{what}" for what in ("optimizer", "dataloader", "meters", "lr-scheduler")]
    starts = {"tuned": ["--finetune-from-model", back], "resumed": ["--restore-file", back, *resets]}
    runs = [{"tool": "train", "args": [*args, *how, "--save-dir", tmp_path / name]} for name, how in starts.items()]
    for name, run in zip(starts, run_fairseq_many(runs), strict=True):
        assert run.rc == 0, run
        last = tmp_path / name / "checkpoint_last.pt"
        assert open_checkpoint(last).num_updates == 1
        found = smlp.load_pretrained(last).core.state_dict()
        for weight, value in decoder.state_dict().items():
            torch.testing.assert_close(found[weight], value, msg=weight)


def test_a_model_is_fine_tuned_by_the_trainer_and_comes_back(tmp_path):
    path, _ = write_checkpoint(tmp_path / "ours", WORDS, "switch_lm_tiny", 12)
    folder = exported(path, tmp_path / "hf")
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    rows = [tokenizer(text) for text in ["the s1 v1 the o1", "a s2 v2", "the s1 v1 the o2"] * 4]
    arguments = TrainingArguments(
        str(tmp_path / "run"),
        **{"max_steps": 8, "learning_rate": 0.02, "per_device_train_batch_size": 6, "gradient_accumulation_steps": 2},
        **{"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1},
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=rows,
        eval_dataset=rows,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        processing_class=tokenizer,
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 0.8 * before
    trainer.save_model(str(tmp_path / "tuned"))
    shutil.copy(folder / "dict.txt", tmp_path / "tuned")
    back = tmp_path / "back" / "checkpoint.pt"
    assert command("checkpoint", "import", tmp_path / "tuned", "-o", back) == 0
    tokens = torch.randint(4, 14, (2, 9))
    assert torch.equal(smlp.load_pretrained(back)(tokens).logits, model.eval()(tokens).logits)


REMOTE = """
import sys
sys.modules["torchvision"] = sys.modules["torchaudio"] = None  # those of another torch keep transformers from loading
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, again = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
assert "smlp" not in sys.modules
for place in (folder, again):
    model = AutoModelForCausalLM.from_pretrained(place, trust_remote_code=True)
    model.save_pretrained(again)
prompt = tokenizer("the s1", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=4, do_sample=False)[0]))
"""


def test_a_folder_is_read_without_this_package_being_named(tmp_path, monkeypatch):
    """Through its own thin file, which a model saved again has too."""
    path, _ = write_checkpoint(tmp_path / "ours", WORDS, "smlp_tiny", 12)
    folder = exported(path, tmp_path / "hf")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    script = tmp_path / "read.py"
    script.write_text(REMOTE)
    done = run_python(script, folder, tmp_path / "again", timeout=100)
    assert done.rc == 0, done.stderr
    assert done.stdout.strip().endswith(smlp.load_pretrained(path).generate("the s1", 4, greedy=True, stop_at_eos=True))
    assert (tmp_path / "again" / "modeling_smlp.py").read_text() == (folder / "modeling_smlp.py").read_text()


def test_without_this_package_no_other_one_is_offered(tmp_path, monkeypatch):
    """Neither ``pip install smlp``, which is another project, nor a traceback from inside of that one."""
    path, _ = write_checkpoint(tmp_path / "ours", WORDS, "smlp_tiny", 12)
    folder = exported(path, tmp_path / "hf")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    script = tmp_path / "read.py"
    lines = ["import sys", "sys.modules['smlp'] = None", "from transformers import AutoConfig"]
    script.write_text("\n".join([*lines, "AutoConfig.from_pretrained(sys.argv[1], trust_remote_code=True)"]))
    done = run_python(script, folder, timeout=100)
    assert done.rc == 1 and "needs the package smlp-lm with its extra hf" in done.stderr.splitlines()[-1]
    assert "pip install smlp`" not in done.stderr


def raises(error):
    raise error


def write_but(missing, path, *content):
    return raises(OSError(28, "no space left")) if Path(path) == missing else write_whole(path, *content)


def refused(capsys, *words):
    capsys.readouterr()
    assert command(*words) == 1
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1 and error[0].startswith("smlp: error: ")
    return error[0]


def test_bad_input_is_one_sentence(tmp_path, capsys, monkeypatch):
    path, _ = write_checkpoint(tmp_path / "ours", WORDS, "smlp_tiny", 12)
    folder = exported(path, tmp_path / "hf")
    assert "is not an empty folder" in refused(capsys, "export", path, folder, "--hf")
    for given in (folder, folder / "model.safetensors"):
        said = refused(capsys, "checkpoint", "info", given)
        assert f"{folder} is a folder of transformers" in said and f"smlp checkpoint import {folder} -o" in said
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert "link exists and is not an empty folder" in refused(capsys, "export", path, tmp_path / "link", "--hf")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert "is a link or the current folder" in refused(capsys, "export", path, ".", "--hf")
    (path.parent / "dict.txt").rename(tmp_path / "dict.txt")
    assert "no dict.txt beside" in refused(capsys, "export", path, tmp_path / "new", "--hf")
    (tmp_path / "new").mkdir(mode=0o700)
    exported(path, tmp_path / "new", "--dict", tmp_path / "dict.txt")
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700, "a private folder stays private"
    out = tmp_path / "back.pt"
    assert "there is no folder" in refused(capsys, "checkpoint", "import", tmp_path / "none", "-o", out)
    for size in ("5", "0GB", "1e400GB", "nan"):
        words = refused(capsys, "export", path, tmp_path / "small", "--hf", "--max-shard-size", size)
        assert words.endswith(f"such as 5GB; got {size!r}") and not (tmp_path / "small").exists()
    for kind, method, error in (
        (smlp.hf.SmlpForCausalLM, "save_pretrained", lambda model: SafetensorError("no space left")),
        (PreTrainedTokenizerFast, "save_pretrained", lambda tokens: Exception("no space left (os error 28)")),
        (Path, "write_text", lambda path: OSError(28, "no space left", str(path))),
        (Path, "write_text", lambda path: OSError(28, "no space left")),
    ):
        with monkeypatch.context() as full:
            full.setattr(kind, method, lambda self, *args, error=error, **kw: raises(error(self)))
            inside = tmp_path / "full" / "of" / "parents"
            words = refused(capsys, "export", path, inside, "--hf", "--dict", tmp_path / "dict.txt")
            assert f"{inside} cannot be written: no space left" in words
            assert not [name for name in os.listdir(tmp_path) if "full" in name]
    inside = tmp_path / "full" / "of" / ("x" * 250)
    assert "File name too long" in refused(capsys, "export", path, inside, "--hf", "--dict", tmp_path / "dict.txt")
    assert not (tmp_path / "full").exists()
    assert len({file.stat().st_mode for file in folder.iterdir()}) == 1, "whoever may read one file may read all"
    (back := tmp_path / "back").mkdir()
    for module, lacks in (("output", "b.pt"), ("load", "dict.txt")):
        with monkeypatch.context() as full:
            full.setattr(f"smlp.checkpoint.{module}.write_whole", partial(write_but, back / lacks))
            assert "no space left" in refused(capsys, "checkpoint", "import", folder, "-o", back / "b.pt")
            assert os.listdir(back) == [], "nothing is written"
    weights = folder / "model.safetensors"
    before = weights.read_bytes()
    assert "is an input" in refused(capsys, "checkpoint", "import", folder, "-o", weights, "--force")
    assert weights.read_bytes() == before
    config = json.loads((folder / "config.json").read_text())
    theirs = {name: config[own] for name, own in ALIASES.items()}
    renamed = {**{name: value for name, value in config.items() if name not in ALIASES.values()}, **theirs}
    (folder / "config.json").write_text(json.dumps(renamed))
    assert main(["checkpoint", "import", str(folder), "-o", str(back / "renamed.pt")]) == 0
    assert open_checkpoint(back / "renamed.pt").config == open_checkpoint(path).config
    for change, words in (
        ({"model_type": "gpt2"}, "is of another kind of model (model_type 'gpt2')"),
        ({"max_tokens": None}, "max_tokens is None, not a whole number"),
        ({"max_tokens": 0}, "config.json is damaged: max_tokens must be at least 1, got 0"),
        ({"ffn_dim": 64}, "does not fit its configuration"),
        ({"router": "none"}, "router must be one of"),
        ({"router": None}, "config.json is damaged: router is null"),
        ({"num_updates": 10**400}, "config.json is damaged: num_updates is 1"),
        ({"num_updates": 5 * 10**9}, "num_updates is 5000000000, but must be a whole number from 0 to 2147483648"),
        ({"capacity_factor": 10**400}, "capacity_factor is a number of 1,329 bits, too large for a float"),
        ({"gmlp_attention_dim": 10**30}, "gmlp_attention_dim must be at most 2,147,483,647"),
        ({"vocab_size": 99}, "vocab_size is 99, but the weights have 14"),
        ({"bos_token_id": 5}, "bos_token_id must be 0 or 2, got 5"),
        ({"padding_idx": 0}, "padding_idx must be 1, got 0"),
    ):
        (folder / "config.json").write_text(json.dumps({**config, **change}))
        assert words in refused(capsys, "checkpoint", "import", folder, "-o", out)
    (folder / "config.json").write_text("{")
    assert "config.json cannot be read" in refused(capsys, "checkpoint", "import", folder, "-o", out)
    (folder / "config.json").write_text(json.dumps(config))
    named = refused(capsys, "checkpoint", "import", folder, "-o", tmp_path / "back.safetensors")
    assert "must end in .pt" in named and not (tmp_path / "back.safetensors").exists()
    symbols = (folder / "dict.txt").read_text()
    (folder / "dict.txt").write_text("one 1\n")
    said = refused(capsys, "checkpoint", "import", folder, "-o", out)
    assert f"in {folder}: dictionary dict.txt has 5 symbols" in said
    (folder / "dict.txt").write_text("\n".join(reversed(symbols.splitlines())) + "\n")
    assert "one of them belongs to another model" in refused(capsys, "checkpoint", "import", folder, "-o", out)
    (folder / "dict.txt").write_text(symbols)
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": [[[1], 0.0]]}}))  # a piece that is no text
    (folder / "config.json").write_text(json.dumps({**config, "arch": None}))  # as of a model built in transformers
    assert command("checkpoint", "import", folder, "-o", tmp_path / "odd.pt") == 0
    assert open_checkpoint(tmp_path / "odd.pt").arch == "smlp"  # a name that fairseq knows
    whole = load_file(folder / "model.safetensors")
    save_file(whole | {"value.weight": torch.zeros(2)}, folder / "model.safetensors", {"format": "pt"})
    assert command("checkpoint", "import", folder, "-o", tmp_path / "more.pt") == 0
    assert "left out, as no part of the model: value.weight" in capsys.readouterr().err
    save_file(whole | {"core.norm.bias": torch.zeros(2).to(torch.float8_e4m3fn)}, folder / "model.safetensors")
    assert "'core.norm.bias' is of type F8_E4M3" in refused(capsys, "checkpoint", "import", folder, "-o", out)
    bias = whole.pop("core.norm.bias")
    for change, words in (
        ({"core.norm.bias": bias * torch.nan}, "core.norm.bias of {} is not finite"),
        ({}, "{} does not fit .*: it lacks core.norm.bias"),
    ):
        save_file(whole | change, folder / "model.safetensors")
        said = refused(capsys, "checkpoint", "import", folder, "-o", out)
        assert re.search(f"error: {words.format(folder)}", said), said
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    assert "neither model.safetensors nor" in refused(capsys, "checkpoint", "import", folder, "-o", out)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"core.norm.bias": "../hf/other.safetensors"}}))
    assert "would lie outside its folder" in refused(capsys, "checkpoint", "import", folder, "-o", out)
    index.write_text(json.dumps({"weight_map": {"core.norm.bias": "gone.safetensors"}}))
    assert "lacks gone.safetensors" in refused(capsys, "checkpoint", "import", folder, "-o", out)
    index.write_text(json.dumps({"weight_map": {}}))
    assert "json is damaged: it has no weight_map" in refused(capsys, "checkpoint", "import", folder, "-o", out)
    index.write_text(json.dumps({"weight_map": {"core.norm.bias": "other.safetensors"}}))
    assert "other.safetensors lacks core.norm.bias" in refused(capsys, "checkpoint", "import", folder, "-o", out)
    # a shard may hold an older copy of what the index says is in another
    save_file({name: tensor * 0 for name, tensor in whole.items()}, folder / "stale.safetensors", {"format": "pt"})
    save_file(whole | {"core.norm.bias": bias}, folder / "a.safetensors", {"format": "pt"})
    places = dict.fromkeys([*whole, "core.norm.bias"], "a.safetensors") | {"core.norm.weight": "stale.safetensors"}
    index.write_text(json.dumps({"weight_map": places}))
    assert command("checkpoint", "import", folder, "-o", tmp_path / "shards.pt") == 0
    weights = open_checkpoint(tmp_path / "shards.pt").state["model"]
    for name, wanted in (whole | {"core.norm.bias": bias, "core.norm.weight": whole["core.norm.weight"] * 0}).items():
        assert torch.equal(weights[f"decoder.{name}"].load(), wanted), name
    save_file(whole | {"core.embedding.weight": torch.zeros(8)}, folder / "model.safetensors", {"format": "pt"})
    said = refused(capsys, "checkpoint", "import", folder, "-o", out)
    assert f"{folder} is damaged: core.embedding.weight has shape (8,)" in said
    save_file(whole | {"core.norm.bias": bias, "a\n\x1b[1m": bias + 1}, folder / "model.safetensors", {"format": "pt"})
    assert command("checkpoint", "import", folder, "-o", tmp_path / "odd name.pt") == 0
    assert r"no part of the model: a\n\x1b[1m" in capsys.readouterr().err
    assert not out.exists() and not list(tmp_path.glob(".new*"))
    monkeypatch.setitem(sys.modules, "smlp.hf.export", None)
    assert "pip install -e '.[hf]'" in refused(capsys, "export", path, tmp_path / "x", "--hf")
