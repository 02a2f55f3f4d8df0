"""``smlp data squad``: question answering in SQuAD's JSON, as tokens with their characters, for the task ``squad``."""

from __future__ import annotations

import argparse
import functools
import io
import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.binarize.encoding import LINES, check_tokenizer
from data_prep.finetuning.glue import TRAIN, VALID, add_file_options, command_lines, named_files
from data_prep.flow.manifest import Counts, PartResult, is_whole, read_manifest, write_manifest
from data_prep.flow.options import cached_tokenizer, run_of, tokenizer_files, tokenizer_setting
from data_prep.flow.parts import FilePart
from data_prep.flow.running import Report, aligned, begin, note_files, run_parts
from data_prep.flow.streams import DamagedFile, read_unpacked, write_bytes
from smlp.errors import UserError
from smlp.text.squad import NO_ANSWER, SquadSplit
from smlp.text.tokenizer import Tokenizer, check_characters

DESCRIPTION = """question answering in SQuAD's JSON (v1.1, v2.0), for the task squad that comes with this package

Checks that every answer stands where the file says. Keeps the characters that each token comes from, so that spans of
tokens become text again; says how many answers begin or end within a token, which no span can give exactly. Prints the
command that fine-tunes on the data."""
EPILOG = """examples:
  smlp data squad --train train-v1.1.json --valid dev-v1.1.json --tokenizer data/tokenizer --out data/squad
  smlp data squad --train train-v2.0.json.gz --valid dev-v2.0.json.gz --tokenizer data/tokenizer --out data/squad2
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the step."""
    group = parser.add_argument_group("input")
    add_file_options(parser, group, ".json, plain, .gz, .xz, .bz2 or .zst")


def run(args: argparse.Namespace) -> int:
    """Encode every split, write the manifest; return the exit status."""
    files = named_files(args)
    if not files:
        raise UserError("name the files with --train, --valid or --test")
    vocab_size = len(check_tokenizer(args.tokenizer, LINES))
    run = run_of(args)
    names = {split: str(path) for split, path in files.items()}
    settings = {"files": names, "tokenizer": tokenizer_setting(args.tokenizer)}
    begin(run, "squad", settings, args.restart)
    report = Report("squad", run)
    parts = [replace(FilePart.whole(path), name=split) for split, path in files.items()]
    done = run_parts(run, "encode", parts, functools.partial(encode_split, tokenizer=args.tokenizer))
    if done.results is None:
        return report.waiting(done, "the splits")
    if not is_whole(run.out, done.inputs, settings):
        splits = {part.name: result.facts for part, result in zip(parts, done.results, strict=True)}
        beside = tokenizer_files(args.tokenizer)
        note_files(run.out, [path.name for path in beside])
        outputs = [write_bytes(run.out / path.name, path.read_bytes()) for path in beside]
        results = [*done.results, PartResult(outputs, Counts())]
        write_manifest(run.out, "squad", settings, done.inputs, results, {"splits": splits, "dictionary": vocab_size})
    manifest = read_manifest(run.out, "squad")
    return report.finished(manifest, *_lines(manifest["splits"]), "", *command(run.out, list(files)))


def encode_split(part: FilePart, out: Path, tokenizer: Path) -> PartResult:
    """Write the two files of a split.

    Raises:
        UserError: the file is damaged or not in SQuAD's form, an answer is not in its context, or a text has no token.
    """
    encoder = cached_tokenizer(tokenizer)
    questions = list(read_questions(part.path))
    found, inexact = encode_questions(questions, encoder, part.path)
    files, arrays = found.files(), io.BytesIO()
    np.savez(arrays, **files["npz"])
    texts = json.dumps(files["json"], ensure_ascii=False).encode()
    outputs = [
        write_bytes(out / f"{part.name}.{suffix}", content)
        for suffix, content in (("npz", arrays.getvalue()), ("json", texts))
    ]
    unknown = (found.context_tokens == encoder.vocabulary.unk, found.question_tokens == encoder.vocabulary.unk)
    facts = {
        "questions": len(found.ids),
        "unanswerable": sum(not answers for answers in found.answers),
        "inexact": inexact,
        "contexts": len(found.contexts),
        "tokens": len(found.context_tokens) + len(found.question_tokens),
        "unknown": sum(int(np.count_nonzero(is_unknown)) for is_unknown in unknown),
        "longest": int(np.diff(found.context_starts).max()),
    }
    defects = [
        {"problem": problem, "where": f"{part.path}, question {question.id}"}
        for question in questions
        for problem in question.misplaced
    ]
    return PartResult(outputs, Counts(), defects, facts)


@dataclass(frozen=True)
class Question:
    """A question of a file; ``answers`` are pairs of text and first character, none where there is no answer."""

    id: str
    text: str
    context: str
    answers: list[tuple[str, int]]
    misplaced: list[str]  # what is wrong with the places of answers after the first


def read_questions(path: Path) -> Iterator[Question]:
    """Yield the questions of a file in its order.

    Raises:
        UserError: it is no JSON in SQuAD's form, or an answer is not in its context.
    """
    try:
        data = json.loads(read_unpacked(path))
    except UserError:  # which is a ValueError
        raise
    except DamagedFile as error:
        raise UserError(f"{error}: it is damaged") from None
    except (ValueError, RecursionError) as error:  # no JSON, or not UTF-8
        raise UserError(f"{path} is not SQuAD's JSON: {error}") from None
    seen: set[str] = set()
    for article_at, article in enumerate(_field(data, "data", list, f"{path}")):
        place = f"{path}, data[{article_at}]"
        for paragraph_at, paragraph in enumerate(_field(article, "paragraphs", list, place)):
            inside = f"{place}.paragraphs[{paragraph_at}]"
            context = _field(paragraph, "context", str, inside)
            for question_at, row in enumerate(_field(paragraph, "qas", list, inside)):
                name = _field(row, "id", str, f"{inside}.qas[{question_at}]")
                try:
                    check_characters(name)
                except UserError as error:
                    raise UserError(f"{inside}.qas[{question_at}]: 'id': {error}") from None
                if name in seen:
                    raise UserError(f"{path} has two questions with the id {name!r}")
                seen.add(name)
                yield _question(row, name, context, f"{path}, question {name}")
    if not seen:
        raise UserError(f"{path} has no question")


def _question(row: Any, name: str, context: str, place: str) -> Question:
    answers, misplaced = [], []
    is_impossible = row.get("is_impossible", False)
    if not isinstance(is_impossible, bool):
        raise UserError(f"{place}: 'is_impossible' must be true or false, found {is_impossible!r:.80}")
    for answer in _field(row, "answers", list, place):
        text, start = _field(answer, "text", str, place), _field(answer, "answer_start", int, place)
        if not text.strip():
            raise UserError(f"{place}: the answer {text!r:.80} is blank")
        if start < 0 or context[start : start + len(text)] != text:
            there = context[max(start, 0) : max(start, 0) + len(text)]
            problem = f"the answer {text!r:.80} is not at character {start} of the context, which has {there!r:.80}"
            if not answers or text not in context:
                raise UserError(f"{place}: {problem}")
            misplaced.append(problem)  # only the first one is learnt; a few others are off by one in SQuAD itself
        answers.append((text, start))
    if is_impossible == bool(answers):
        raise UserError(f"{place}: {'it has answers but is_impossible is true' if answers else 'it has no answer'}")
    return Question(name, _field(row, "question", str, place), context, answers, misplaced)


def _field(row: Any, name: str, kind: type, place: str) -> Any:
    value = row.get(name) if isinstance(row, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool):
        words = {list: "a list", str: "a text", int: "a whole number"}
        is_there = isinstance(row, dict) and name in row
        raise UserError(
            f"{place}: {name!r} must be {words[kind]}, {f'found {value!r:.80}' if is_there else 'but is missing'}"
        )
    return value


def encode_questions(questions: list[Question], tokenizer: Tokenizer, path: Path) -> tuple[SquadSplit, int]:
    """Return the questions as tokens, and how many have a first answer that no span of tokens gives exactly.

    A span begins with the first token that has a character of the answer and ends with the last one.

    Raises:
        UserError: a text has no token, or is no Unicode text.
    """
    context_of: dict[str, int] = {}
    contexts, asked, answer_Q2, inexact = [], [], [], 0
    for question in questions:
        place = f"{path}, question {question.id}"
        try:
            asked.append(tokenizer.encode(question.text))
            if question.context not in context_of:
                context_of[question.context] = len(contexts)
                contexts.append(tokenizer.encode_with_offsets(question.context))
        except UserError as error:
            raise UserError(f"{place}: {error}") from None
        offsets_N2 = contexts[context_of[question.context]][1]
        if not asked[-1] or not len(offsets_N2):
            raise UserError(f"{place}: its {'context' if asked[-1] else 'question'} has no token")
        if not question.answers:
            answer_Q2.append((NO_ANSWER, NO_ANSWER))
            continue
        text, start = question.answers[0]
        begin, end = start + len(text) - len(text.lstrip()), start + len(text.rstrip())
        if offsets_N2[0, 0] >= end:
            raise UserError(f"{place}: its answer {text!r:.80} ends before the first token")
        if offsets_N2[-1, 1] <= begin:
            raise UserError(f"{place}: its answer {text!r:.80} begins after the last token")
        first = int(np.argmax(offsets_N2[:, 1] > begin))
        last = max(int(np.flatnonzero(offsets_N2[:, 0] < end)[-1]), first)
        inexact += question.context[offsets_N2[first, 0] : offsets_N2[last, 1]] != text.strip()
        answer_Q2.append((first, last))
    split = SquadSplit(
        context_tokens=np.concatenate([ids for ids, _ in contexts]).astype(np.int32),
        context_starts=np.cumsum([0, *(len(ids) for ids, _ in contexts)]),
        offsets=np.concatenate([offsets for _, offsets in contexts]),
        question_tokens=np.concatenate(asked).astype(np.int32),
        question_starts=np.cumsum([0, *map(len, asked)]),
        context_of_question=np.array([context_of[question.context] for question in questions], np.int32),
        answer_tokens=np.array(answer_Q2, np.int32),
        contexts=list(context_of),
        ids=[question.id for question in questions],
        answers=[[text for text, _ in question.answers] for question in questions],
    )
    return split, inexact


def _lines(splits: dict[str, dict[str, Any]]) -> list[str]:
    """Return lines for the terminal: what each split holds."""
    rows = [("split", "questions", "unanswerable", "not exact", "contexts", "tokens", "unknown", "longest context")]
    for split, facts in splits.items():
        names = ("questions", "unanswerable", "inexact", "contexts", "tokens", "unknown", "longest")
        rows.append((split, *(f"{facts[name]:,}" for name in names)))
    return aligned(rows, right=range(1, 8)).split("\n")


def command(out: Path, splits: list[str]) -> list[str]:
    """Return the lines of the command that fine-tunes on the data, as the gMLP paper does on SQuAD."""
    valid = [split for split in splits if split.startswith(VALID)]
    lines = [
        f"fairseq-train {shlex.quote(str(out))} --user-dir $(smlp user-dir) --arch ARCH --save-dir DIR",
        "--finetune-from-model PRETRAINED.pt",
        "--task squad --criterion span --max-positions 512 --doc-stride 128 --batch-size 32 --optimizer adam",
        "--adam-betas '(0.9,0.999)' --adam-eps 1e-6 --weight-decay 0.01 --dropout 0.1 --lr 5e-5",
        "--lr-scheduler polynomial_decay --total-num-update 8000 --warmup-updates 1000 --max-update 8000",
        f"--no-epoch-checkpoints --valid-subset {','.join(valid)} --best-checkpoint-metric f1 "
        "--maximize-best-checkpoint-metric"
        if valid
        else "--no-epoch-checkpoints --disable-validation",
    ]
    return command_lines(lines) if TRAIN in splits else []
