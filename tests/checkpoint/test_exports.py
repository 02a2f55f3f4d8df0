"""Exports: a model in one file that is read alone, by ``smlp.load_pretrained`` and by others."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from checkpoint_states import PREFIX, WORDS, command, content, differences, refused, save
from running import run_python
from squad_data import write_tokenizer

import smlp
from data_prep.tokenize.models import train_sentencepiece
from smlp.checkpoint.opened import open_checkpoint
from smlp.config import unflatten
from smlp.nn.decoder import Decoder
from smlp.text.tokenizer_files import RECORD, Vocabulary, record_of

pytestmark = pytest.mark.timeout(120)


BLOCKED = """
import sys

class NoFairseq:
    def find_spec(self, name, *rest):
        if name.split(".")[0] in ("fairseq", "hydra", "omegaconf"):
            raise ImportError(f"{name} is not here")

sys.meta_path.insert(0, NoFairseq())
import smlp
for path in sys.argv[1:]:
    print(smlp.load_pretrained(path).generate("w1 w2", 5, smlp.inference.generation.Sampling(temperature=0)))
"""


def test_exports_are_read_alone_and_without_fairseq(whole: Path, parts: Path, tmp_path: Path) -> None:
    exports = [tmp_path / "alone" / name for name in ("model.pt", "model.safetensors")]
    for path in exports:
        assert command("merge", parts, "-o", path, "--export") == 0
    assert sorted(path.name for path in (tmp_path / "alone").iterdir()) == ["model.pt", "model.safetensors"]
    script = tmp_path / "read.py"
    script.write_text("import smlp.inference.generation\n" + BLOCKED)
    run = run_python(script, whole, parts, *exports, timeout=60)
    assert run.rc == 0, run.stderr
    lines = run.stdout.splitlines()
    assert len(lines) == 4 and lines[0] and lines == [lines[0]] * 4
    tokens = torch.randint(4, 24, (2, 12))
    original = smlp.load_pretrained(whole)
    for path in (parts, *exports):
        model = smlp.load_pretrained(path)
        assert torch.equal(model(tokens).logits, original(tokens).logits)
        assert model.vocabulary.symbols == original.vocabulary.symbols


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors", "model.SAFETENSORS"])
def test_an_export_is_no_damaged_checkpoint(whole: Path, tmp_path: Path, name) -> None:
    """To fairseq: the sentence names the command that makes a checkpoint of it."""
    from fairseq import checkpoint_utils

    from smlp.fairseq_compat import apply

    apply()
    assert command("merge", whole, "-o", tmp_path / name, "--export") == 0
    with pytest.raises(smlp.UserError, match=rf"{name} is an export, .*: smlp checkpoint merge .*{name} -o CHECKPOINT"):
        checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / name))
    if name.endswith(".pt"):
        export = content(tmp_path / name)
        export["settings"]["twist"] = export["cfg"]["model"]["twist"] = 3  # of a newer version
        torch.save(export, tmp_path / name)
        with pytest.raises(smlp.UserError, match=rf"{name} is an export, "):
            checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / name))


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_a_criterion_without_a_dataclass(whole: Path, tmp_path: Path, suffix) -> None:
    """fairseq keeps its options in a Namespace, which JSON does not know."""
    state = torch.load(whole, weights_only=True)
    state["cfg"]["criterion"] = argparse.Namespace(_name="span", seed=1)
    torch.save(state, tmp_path / "given.pt")
    assert command("merge", tmp_path / "given.pt", "-o", tmp_path / f"export.{suffix}", "--export") == 0
    assert open_checkpoint(tmp_path / f"export.{suffix}").state["cfg"]["criterion"] == {"_name": "span", "seed": 1}


def test_an_export_is_plain_torch(whole: Path, tmp_path: Path) -> None:
    assert command("merge", whole, "-o", tmp_path / "e.pt", "--export") == 0
    for mapped in (False, True):
        export = torch.load(tmp_path / "e.pt", weights_only=True, mmap=mapped)
        decoder = Decoder(unflatten(export["settings"]))
        decoder.load_state_dict(export["weights"])
    assert export["arch"] == "base_lm_tiny" and export["num_updates"] == 2
    assert bytes(export["files"]["dict.txt"].tolist()).decode().split() == [w for word in WORDS for w in (word, "1")]
    assert "last_optimizer_state" not in export


def test_an_export_is_plain_safetensors(whole: Path, tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file

    path = tmp_path / "e.safetensors"
    assert command("merge", whole, "-o", path) == 0
    tensors = load_file(path)
    expected = {name.removeprefix(PREFIX): tensor for name, tensor in content(whole)["model"].items()}
    assert differences(expected, {n: t for n, t in tensors.items() if not n.startswith("files/")}) == []
    assert tensors["files/dict.txt"].dtype == torch.uint8
    with safe_open(path, "pt") as file:
        facts = json.loads(file.metadata()["smlp"])
    assert facts["settings"]["num_experts"] == 4 and facts["cfg"]["model"]["activation"] == "gelu"


def test_an_export_that_could_not_be_read_is_not_written(whole: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    """Neither through the small header of a .safetensors file nor with numbers that a .pt file does not take."""
    path = tmp_path / "e.safetensors"
    assert command("merge", whole, "-o", path) == 0
    text = path.read_bytes()
    size = int.from_bytes(text[:8], "little")
    header = json.loads(text[8 : 8 + size])
    facts = json.loads(header["__metadata__"]["smlp"])
    facts["cfg"]["common"] = {"seed": 10**400}
    header["__metadata__"]["smlp"] = json.dumps(facts)
    changed = json.dumps(header).encode()
    (tmp_path / "large.safetensors").write_bytes(len(changed).to_bytes(8, "little") + changed + text[8 + size :])
    error = refused(capsys, "merge", tmp_path / "large.safetensors", "-o", tmp_path / "x.pt")
    assert "large.safetensors holds a number of more than 1,024 bits" in error
    monkeypatch.setattr("smlp.checkpoint.export._MOST_HEADER", 1000)
    kept = path.read_bytes()
    assert "the configuration takes" in refused(capsys, "merge", whole, "-o", path, "--force")
    assert path.read_bytes() == kept and not (tmp_path / "x.pt").exists()


def test_the_sentencepiece_model_travels_along(tmp_path: Path) -> None:
    import sentencepiece

    text = tmp_path / "text.txt"
    text.write_text("the old man and the sea\nthe young man and the old sea\n" * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(tmp_path / "sentencepiece"),
        vocab_size=40,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "sentencepiece.model"))
    others = [i for i in range(pieces.get_piece_size()) if not (pieces.is_control(i) or pieces.is_unknown(i))]
    symbols = [pieces.id_to_piece(i) for i in others]
    path = save(tmp_path, "dense_lm_tiny", vocab_size=len(symbols) + 4)
    (tmp_path / "dict.txt").write_text("".join(f"{symbol} 1\n" for symbol in symbols), encoding="utf-8")
    for name in ("e.pt", "e.safetensors"):
        export = tmp_path / "alone" / name
        assert command("merge", path, "-o", export, "--export") == 0
        tokenizer = smlp.load_pretrained(export).tokenizer
        assert tokenizer.decode(tokenizer.encode("the young sea")) == "the young sea"
        assert command("merge", export, "-o", tmp_path / name.replace(".", "") / "x.pt") == 0
    assert sorted(path.name for path in (tmp_path / "ept").iterdir()) == ["dict.txt", "sentencepiece.model", "x.pt"]
    model = (tmp_path / "ept" / "sentencepiece.model").read_bytes()
    assert model == (tmp_path / "sentencepiece.model").read_bytes()


def test_an_export_keeps_the_settings_that_presets_may_change(whole: Path, tmp_path: Path, monkeypatch) -> None:
    state = content(whole)
    state["cfg"]["model"]["activation"] = None  # left to the architecture, as fairseq keeps it
    torch.save(state, whole)
    assert command("merge", whole, "-o", tmp_path / "e.pt", "--export") == 0
    monkeypatch.setitem(smlp.PRESETS["base_lm_tiny"], "activation", "relu")
    assert smlp.load_pretrained(whole).decoder.config.activation == "relu"
    assert smlp.load_pretrained(tmp_path / "e.pt").decoder.config.activation == "gelu"


def test_without_the_library_safetensors_is_refused_before_anything_is_written(
    whole: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert "pip install -e '.[export]'" in refused(capsys, "merge", whole, "-o", tmp_path / "e.safetensors")
    assert not (tmp_path / "e.safetensors").exists()


def test_another_dictionary_beside_the_output_is_not_written_over(whole: Path, tmp_path: Path, capsys) -> None:
    export = tmp_path / "e.pt"
    assert command("merge", whole, "-o", export, "--export") == 0
    other = tmp_path / "other"
    other.mkdir()
    (other / "dict.txt").write_text("the 1\n")
    capsys.readouterr()
    for arguments in (["merge", export, "-o", other / "x.pt"], ["split", export, "-o", other / "x.pt", "--parts", 2]):
        assert "dict.txt differs from the export's" in refused(capsys, *arguments)
    assert [path.name for path in other.iterdir()] == ["dict.txt"]
    (other / "dict.txt").unlink()
    os.mkfifo(other / "dict.txt")
    assert "dict.txt is not a regular file but a named pipe" in refused(capsys, "merge", export, "-o", other / "x.pt")


def _with_file(export: Path, name: str, target: Path) -> Path:
    """A copy of an export that holds one more file."""
    added = torch.frombuffer(bytearray(b"not yours"), dtype=torch.uint8)
    if export.suffix == ".pt":
        state = content(export)
        state["files"][name] = added
        torch.save(state, target)
    else:
        from safetensors import safe_open
        from safetensors.torch import load_file, save_file

        with safe_open(export, "pt") as opened:
            save_file({**load_file(export), f"files/{name}": added}, target, metadata=opened.metadata())
    return target


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_an_export_writes_no_file_but_its_own(whole: Path, tmp_path: Path, suffix, capsys) -> None:
    export, outside = tmp_path / f"e{suffix}", tmp_path / "outside"
    assert command("merge", whole, "-o", export, "--export") == 0
    capsys.readouterr()
    for name in (
        str(outside),
        "../outside",
        f"../../{tmp_path.name}/outside",
        "dict.txt/../../outside",
        "notes.txt",
        "",
    ):
        evil = _with_file(export, name, tmp_path / f"evil{suffix}")
        words = f"holds the file {name!r}: an export has dict.txt, sentencepiece.model, encoder.json, vocab.bpe only"
        for arguments in (["verify", evil], ["info", evil], ["merge", evil, "-o", tmp_path / "out" / "o.pt"]):
            assert words in refused(capsys, *arguments)
        with pytest.raises(smlp.UserError, match="holds the file"):
            smlp.load_pretrained(evil)
        assert not outside.exists() and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s["files"].update({"dict.txt": "a string"}),
        lambda s: s["files"].update({"dict.txt": torch.ones(3)}),
        lambda s: s.update(weights=3),
        lambda s: s["weights"].update({"norm.bias": "a string"}),
        lambda s: s["weights"].pop("embedding.weight"),
        lambda s: s.update(cfg="a string"),
        lambda s: s["cfg"].update(model=None),
        lambda s: s.update(num_updates="six"),
        lambda s: s["settings"].update(vocab_size=10**12),
        lambda s: s["settings"].update(max_tokens=11),
        lambda s: s["settings"].pop("padding_idx"),
        lambda s: s["settings"].update(num_experts="4"),
        lambda s: s["settings"].update(dropout=float("nan")),
        lambda s: s["settings"].update(activation="unheard of"),
        lambda s: [settings.update(twist=3) for settings in (s["settings"], s["cfg"]["model"])],  # of a newer version
    ],
)
def test_a_damaged_export_is_one_sentence(whole: Path, tmp_path: Path, change, capsys) -> None:
    assert command("merge", whole, "-o", tmp_path / "e.pt", "--export") == 0
    state = content(tmp_path / "e.pt")
    change(state)
    torch.save(state, tmp_path / "e.pt")
    capsys.readouterr()
    assert "e.pt" in refused(capsys, "verify", tmp_path / "e.pt")
    with pytest.raises(smlp.UserError, match=r"e\.pt"):
        smlp.load_pretrained(tmp_path / "e.pt")


def test_a_wrong_tokenizer_of_the_user_is_not_said_to_be_in_the_export(whole: Path, tmp_path: Path) -> None:
    export = tmp_path / "e.pt"
    assert command("merge", whole, "-o", export, "--export") == 0
    with pytest.raises(smlp.UserError, match=r"^there is no SentencePiece model .*nothere\.model"):
        smlp.load_pretrained(export, tokenizer=tmp_path / "nothere.model")


def test_a_dictionary_named_for_an_export_leaves_it_its_own_tokenizer(tmp_path: Path) -> None:
    """Another tokenizer that happens to lie beside it is not taken, and none has to."""
    (made := tmp_path / "made").mkdir()
    tokenizer = write_tokenizer(tmp_path / "spm", "bpe")
    vocabulary = Vocabulary.load(tokenizer / "dict.txt")
    whole = save(made, "dense_lm_tiny", vocab_size=len(vocabulary))
    export, again = made / "e.safetensors", made / "again.pt"
    named = {name: tokenizer / name for name in ("dict.txt", "sentencepiece.model")}
    options = ("--dict", named["dict.txt"], "--tokenizer", named["sentencepiece.model"])
    assert command("merge", whole, "-o", export, *options) == 0
    dictionary = Path(shutil.copy(named["dict.txt"], tmp_path / "alone.txt"))
    (made / "dict.txt").unlink()
    for beside in (None, train_sentencepiece(iter(["an other text altogether", "xyz"]), 24, "bpe")):
        if beside is not None:
            (made / "sentencepiece.model").write_bytes(beside)
        lm = smlp.load_pretrained(export, dictionary)
        assert lm.tokenize("the river") == smlp.load_pretrained(export).tokenize("the river")
        assert command("merge", export, "-o", again, "--export", "--force", "--dict", dictionary) == 0
        assert content(again)["files"].keys() == {"dict.txt", "sentencepiece.model"}
        held = bytes(content(again)["files"]["sentencepiece.model"].tolist())
        assert held == named["sentencepiece.model"].read_bytes()


def test_what_is_made_of_an_export_records_its_dictionary(tmp_path: Path) -> None:
    """So training with other symbols is refused, also where no dict.txt lies beside it."""
    whole, export, path = save(tmp_path, "dense_lm_tiny"), tmp_path / "e.safetensors", tmp_path / "new" / "x.pt"
    assert command("merge", whole, "-o", export) == 0
    record = record_of(Vocabulary.load(tmp_path / "dict.txt").symbols)
    for arguments in (("merge",), ("upcycle", "--arch", "hash_lm_tiny", "--num-sparse-layers", 1)):
        assert command(arguments[0], export, "-o", path, "--force", *arguments[1:]) == 0
        assert content(path)["extra_state"][RECORD] == record
    sparse = path
    assert command("split", sparse, "-o", tmp_path / "p" / "x.pt", "--parts", 2) == 0
    assert content(tmp_path / "p" / "x.pt")["extra_state"][RECORD] == record
