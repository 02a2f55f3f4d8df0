"""Run the steps of scripts/quickstart.sh after the installation: text, training, evaluation, samples.

Everything goes to one run folder. A step whose result is there is skipped, so the script can be run again; a run that
was stopped resumes from its last checkpoint.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import sys
import time
import traceback
from pathlib import Path

from smlp.launch.machine import let_waiting_threads_sleep

if __name__ == "__main__":
    let_waiting_threads_sleep()  # here, and in the commands that are started; torch reads it when it is imported

import torch
import training_runs as tools
from training_runs import BATCH_SIZE, ROOT, TOKENS_PER_SAMPLE, TOKENS_PER_UPDATE, WARMUP_UPDATES

import smlp
from data_prep.corpus import MANIFEST, describe_splits, reopen
from smlp.errors import UserError
from smlp.evaluation.curves import draw_curves, read_training_log
from smlp.evaluation.perplexity import Perplexity, measure_text
from smlp.experiments.data import encode_splits
from smlp.experiments.spec import option_words
from smlp.experiments.speed import TimedUpdates
from smlp.files import check_no_other, write_whole
from smlp.launch.local import run_logged
from smlp.text.binarized import read_fairseq_tokens
from smlp.text.ngram import NGramModel
from smlp.text.tokenizer import Vocabulary

#: a sparse and a dense all-MLP of equal FLOPs, each with the levers that help it most (docs/results/sparse_pays.md)
SPARSE, DENSE = "smlp_hash_tiny", "gmlp_lm_tiny"
MODELS = (SPARSE, DENSE)
LEVERS = {"spatial_weights": "toeplitz"}
NGRAMS = {1: "unigram", 2: "bigram", 3: "trigram", 5: "5-gram"}
DRAWN = ("unigram", "bigram", "trigram")  # the 5-gram lies so near the trigram that their labels would overlap
VALIDATIONS = 4
PROMPTS = ("This function returns", "The name of the", "If the argument is not")


def make_text(options: argparse.Namespace, text: Path) -> None:
    """Step 1: make train.txt, valid.txt and test.txt."""
    if options.splits:
        return
    if (text / MANIFEST).is_file():
        print(f"      {text} exists, skipped")
    else:
        module, sources = ("python_docs", []) if not options.text else ("text_files", ["--text", *options.text])
        make = [sys.executable, "-m", f"data_prep.{module}", "--out", str(text), *sources]
        run_logged("text", make, options.logs("text"), ROOT)
    print("      " + describe_splits(json.loads((text / MANIFEST).read_text())).replace("\n", "\n      "))


def make_data(options: argparse.Namespace, text: Path, pieces: Path, data: Path) -> None:
    """Step 2: make a SentencePiece vocabulary of the training text, and fairseq's binary files."""
    if (data / MANIFEST).is_file():
        print(f"      {data} exists, skipped")
    else:
        encode_splits(text, pieces, data, options.vocab_size, options.logs("x").parent)
    print(f"      {len(Vocabulary.load(data / 'dict.txt'))} symbols in {data / 'dict.txt'}")


def seconds_per_update(arch: str, vocab_size: int, num_updates: int = 4) -> float:
    """Measure forward, backward and optimizer of one batch on this machine."""
    model = smlp.build(arch, vocab_size=vocab_size, max_tokens=TOKENS_PER_SAMPLE, dropout=0.0, **LEVERS)
    timed = TimedUpdates(model, "cpu", torch.float32, learning_rate=1e-3)
    tokens = torch.randint(4, vocab_size, (BATCH_SIZE, TOKENS_PER_SAMPLE + 1))
    for _ in range(num_updates):
        timed.update([(tokens[:, :-1], tokens[:, 1:])])
    return min(timed.seconds)


def choose_num_updates(options: argparse.Namespace, data: Path, chosen: Path) -> int:
    """Return each model's updates that fit the time; measured once, so that a stopped run resumes with the same."""
    if not chosen.is_file():
        updates = options.updates
        if updates is None:
            vocab_size = len(Vocabulary.load(data / "dict.txt"))
            seconds = sum(seconds_per_update(arch, vocab_size) for arch in MODELS)
            updates = max(int(options.minutes * 60 / seconds / 10) * 10, 20)
        write_whole(chosen, f"{updates}\n".encode())
    return int(chosen.read_text())


def train(options: argparse.Namespace, arch: str, data: Path, run: Path, num_updates: int) -> None:
    """Steps 3 and 4: run fairseq-train with a live display; its whole output goes to a log."""
    more = ["--warmup-updates", str(min(WARMUP_UPDATES, num_updates // 2)), *option_words(LEVERS)]
    if not tools.train(arch, data, run, num_updates, VALIDATIONS, options.logs(f"train-{arch}"), more=more):
        print(f"      {run} is trained, skipped")


def report(options: argparse.Namespace, text: Path, data: Path, folders: dict[str, Path], num_updates: int) -> None:
    """Step 5: print the table and draw the loss curves."""
    size = measure_text(text / "valid.txt")
    vocab_size = len(Vocabulary.load(data / "dict.txt"))
    train_tokens = read_fairseq_tokens(data / "train").tokens
    valid_tokens = read_fairseq_tokens(data / "valid").tokens
    rows = {}
    for order, name in NGRAMS.items():
        log_probs = NGramModel.fit(train_tokens, order, vocab_size).log_probs(valid_tokens)
        rows[name] = Perplexity.of(log_probs, size)
    baselines = {name: row.per_token for name, row in rows.items() if name in DRAWN}
    for arch, run in folders.items():
        rows[arch] = tools.eval_lm(arch, data, run, options.logs(f"eval-{arch}"), size)
    lines = [
        "| model | valid perplexity per token | per word | per word or line end | seen in training |",
        "|---|---:|---:|---:|---|",
    ]
    seen = num_updates * TOKENS_PER_UPDATE
    for name, row in rows.items():
        source = f"{seen:,} tokens ({seen / train_tokens.size:.2f} epochs)" if name in folders else "the whole text"
        lines.append(
            f"| {name} | {row.per_token:,.1f} | {row.per_word:,.0f} | {row.per_word_or_line_end:,.0f} | {source} |"
        )
    table = "\n".join(lines)
    (options.out / "result.md").write_text(table + "\n")
    result = {
        "updates": num_updates,
        "tokens_per_update": TOKENS_PER_UPDATE,
        "train_tokens": train_tokens.size,
        "valid_tokens": valid_tokens.size,
        "perplexity": {
            name: {
                "per_token": row.per_token,
                "per_word": row.per_word,
                "per_word_or_line_end": row.per_word_or_line_end,
            }
            for name, row in rows.items()
        },
    }
    (options.out / "result.json").write_text(json.dumps(result, indent=2))
    curves = [read_training_log(run / "train.log", arch) for arch, run in folders.items()]
    draw_curves(curves, options.out / "curves.png", baselines)
    print(table)
    print(
        f"\n{train_tokens.size:,} tokens in train, {valid_tokens.size:,} in valid; n-grams: interpolated modified "
        f"Kneser-Ney. Loss curves: {options.out / 'curves.png'}"
    )


def sample(run: Path, prompts: tuple[str, ...]) -> None:
    """Step 6: let the sparse model write text."""
    model = smlp.load_pretrained(run / "checkpoint_best.pt")
    for number, prompt in enumerate(prompts):
        print(f"\n  > {prompt}", end="", flush=True)
        sampling = smlp.inference.generation.Sampling(temperature=0.8, top_p=0.9, seed=number + 1)
        for piece in model.stream(prompt, 60, sampling):
            print(piece.replace("\n", "\n    "), end="", flush=True)
        print()


def announce(step: int, text: str) -> None:
    """Announce a step; an error before the next one is reported under its number."""
    announce.step = step
    print(f"[{step}/6] {text}", flush=True)


announce.step = 0


def positive(text: str) -> int:
    """Parse an option's value, at least 1."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {text}")
    return int(text)


def duration(text: str) -> float:
    """Parse a training time, above 0 and at most a year."""
    if not 0 < float(text) <= 525_600:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 525,600, not {text}")
    return float(text)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bash scripts/quickstart.sh", description=__doc__.splitlines()[0])
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--text", nargs="+", metavar="FILE", help="train on these UTF-8 files instead")
    source.add_argument(
        "--splits", type=Path, metavar="DIR", help="train on DIR/train.txt, with valid.txt and test.txt"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "quickstart", help="default: runs/quickstart")
    parser.add_argument(
        "--minutes", type=duration, default=5.5, help="training time of both models (default: %(default)s)"
    )
    parser.add_argument("--updates", type=positive, help="updates for each model, instead of --minutes")
    parser.add_argument("--vocab-size", type=positive, default=8000, help="default: %(default)s")
    parser.add_argument("--prompt", action="append", help="text to continue; may be given more than once")
    options = parser.parse_args()
    options.out = options.out.resolve()
    if options.text:
        options.text = [str(Path(name).resolve()) for name in options.text]
    options.logs = lambda name: options.out / "logs" / f"{name}.log"
    options.logs("x").parent.mkdir(parents=True, exist_ok=True)
    check_settings(options)
    text = options.splits.resolve() if options.splits else options.out / "text"
    pieces, data = options.out / "pieces", options.out / "data"
    folders = {arch: options.out / arch for arch in MODELS}
    start = time.perf_counter()

    named = options.text or ([str(text)] if options.splits else ["the English in this Python installation"])
    announce(1, f"text: {', '.join(named)}")
    make_text(options, text)
    announce(2, f"vocabulary ({options.vocab_size} pieces, from train only) and binary files")
    make_data(options, text, pieces, data)
    num_updates = choose_num_updates(options, data, options.out / "num_updates")
    for step, arch in enumerate(MODELS, start=3):
        announce(step, f"train {arch}, Toeplitz: {num_updates} updates of {TOKENS_PER_UPDATE} tokens by fairseq-train")
        train(options, arch, data, folders[arch], num_updates)
    announce(5, "evaluate with fairseq-eval-lm, and with n-gram models of the same tokens\n")
    report(options, text, data, folders, num_updates)
    print()
    prompts = tuple(options.prompt or PROMPTS)
    announce(6, f"{len(prompts)} continuations by {SPARSE}")
    sample(folders[SPARSE], prompts)
    minutes = (time.perf_counter() - start) / 60
    best = shlex.quote(os.path.relpath(folders[SPARSE] / "checkpoint_best.pt"))
    data_path = shlex.quote(os.path.relpath(data))
    print(f"""
done in {minutes:.1f} minutes. Checkpoints: {", ".join(os.path.relpath(run) for run in folders.values())}
the next three commands to try (after: source {shlex.quote(os.path.relpath(ROOT / ".venv/bin/activate"))}):
  smlp generate --path {best} --prompt "The module" --top-p 0.9
  smlp leak-test --path {best}
  smlp eval-lm {data_path} --path {best} --gen-subset test --batch-size 32""")


def settings_of(options: argparse.Namespace) -> dict:
    """Return what a run folder belongs to: the text's content, the vocabulary, the models and the training budget."""
    sources = [Path(name) for name in options.text or []]
    if options.splits:
        sources = [options.splits / f"{name}.txt" for name in ("train", "valid", "test")]
    missing = [str(path) for path in sources if not path.is_file()]
    if missing:
        raise UserError(f"there is no text file {', '.join(missing)}")
    checksums = {str(path.resolve()): hashlib.sha256(path.read_bytes()).hexdigest() for path in sources}
    budget = {"updates": options.updates} if options.updates else {"minutes": options.minutes}
    return {"text": checksums, "vocab_size": options.vocab_size, "models": {arch: LEVERS for arch in MODELS}, **budget}


def check_settings(options: argparse.Namespace) -> None:
    """Refuse a run folder that was made with other settings: its parts would be mixed up with new ones."""
    settings, data, text = settings_of(options), options.out / "data" / MANIFEST, options.out / "text"
    is_new = not (options.out / "settings.json").is_file()
    later = ("num_updates", *MODELS)  # depends on the settings, too
    is_fresh = is_new or not (data.is_file() or any((options.out / name).exists() for name in later))
    holds_others = is_new and text.is_dir() and any(text.iterdir())
    if is_new:
        check_no_other(
            options.out, ("pieces", "data", "num_updates", "result.md", "result.json", "curves.png", *MODELS)
        )
    if not options.splits and (holds_others or any(text in Path(name).parents for name in settings["text"])):
        raise UserError(f"{text} has files of yours, and the text of the run would go there: name another --out")
    tools.settle(options.out, settings, is_fresh)
    if is_fresh and not options.splits:
        reopen(text)  # of a try that came no further than its text


if __name__ == "__main__":
    try:
        main()
    except (UserError, OSError) as error:
        sys.exit(f"smlp: error: {error}")
    except KeyboardInterrupt:
        sys.exit("\nstopped; run the same command again to continue")
    except Exception as error:  # a defect of ours or of a library: the log has all of it
        log = ROOT / "runs" / "logs" / "quickstart.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(traceback.format_exc())
        sys.exit(f"smlp: error: step {announce.step} failed, see {log} ({type(error).__name__}: {error})")
