"""What ``smlp eval-lm`` prints."""

from __future__ import annotations

from smlp.config import LEAKY_WARNING, ModelConfig
from smlp.evaluation.parity import Parity
from smlp.evaluation.report import Evaluation
from smlp.evaluation.scoring import Choices


def notes_of(config: ModelConfig, evaluation: Evaluation, choices: Choices, has_text: bool) -> list[str]:
    """Return what a reader must know to compare the numbers.

    Args:
        config: of the model.
        evaluation: its result.
        choices: of experts.
        has_text: whether the original text was given.
    """
    notes = []
    if config.is_leaky:
        notes.append(LEAKY_WARNING)
    num_unscored = int((~evaluation.is_scored_N).sum())
    if num_unscored:
        note = f"{num_unscored:,} of {len(evaluation.is_scored_N):,} tokens are not scored"
        if config.prefix_tokens:
            note += (
                f": the first {config.prefix_tokens} positions of each input choose experts; with --context-window "
                f"{config.prefix_tokens} all tokens but the first {config.prefix_tokens} of the text are scored"
            )
        notes.append(note)
        if has_text:
            notes.append("so words and bytes are those of the decoded tokens that were scored, not of --text")
    if evaluation.unknown_share > 0:
        notes.append(
            f"{evaluation.unknown_share:.3%} of the scored tokens are <unk>, for which a model need not know what was "
            "written: numbers per word and per byte do not compare with those of other vocabularies"
        )
    if choices.num_dropped:
        notes.append(
            f"{choices.dropped_share:.2%} of the choices of experts found no place: the loss depends on the batches, "
            "and on later tokens of a sequence; --eval-capacity-factor 0 drops none"
        )
    return notes


def print_evaluation(name: str, evaluation: Evaluation, seconds: float, notes: list[str]) -> None:
    """Print the numbers, each with what it is divided by."""
    total = evaluation.total
    text = total.text
    source = "of the original text" if evaluation.sizes.of_original else "of the decoded tokens"
    lines = len(evaluation.stream.lengths)
    print(f"{name}: {len(evaluation.stream.tokens):,} tokens in {lines:,} lines")
    print(f"Evaluated {total.num_tokens:,} tokens in {seconds:.1f}s ({total.num_tokens / seconds:.2f} tokens/s)")
    print(f"Loss (base 2): {total.bits_per_token:.4f}, Perplexity: {total.per_token:.2f}")
    rows = [
        ("nats per token", total.nats_per_token, f"{total.num_tokens:,} tokens, {text.num_lines:,} of them </s>"),
        ("bits per token", total.bits_per_token, ""),
        ("perplexity per token", total.per_token, ""),
        ("perplexity per word", total.per_word, f"{text.num_words:,} words {source}"),
        ("perplexity per word or line end", total.per_word_or_line_end, "as is usual for WikiText"),
        ("bits per byte", total.bits_per_byte, f"{text.num_bytes:,} bytes (UTF-8) {source}, one for each line end"),
    ]
    for what, value, over in rows:
        shown = "-" if value is None else f"{value:.6g}"
        print(f"  {what:<33}{shown:>12}  {over}".rstrip())
    print(f"  {'share of <unk>':<33}{evaluation.unknown_share:>12.4%}")
    for note in notes:
        print(f"note: {note}")


def print_parity(what: str, parity: Parity) -> None:
    """Print the losses of a text as a table."""
    print(what)
    print(f"{'dropped':<28}{'ranks':>6}{'batch':>7}{'nats per token':>16}{'difference':>12}{'share':>9}")
    for cell in parity.cells:
        kind = "nothing" if cell.capacity_factor == 0 else f"what exceeds {cell.capacity_factor:g} k*N/E"
        print(
            f"{kind:<28}{cell.num_ranks:>6}{cell.batch_size:>7}{cell.loss:>16.8f}{parity.relative(cell):>12.2e}"
            f"{cell.dropped_share:>9.2%}"
        )
    for sentence in parity.left_out:
        print(f"left out: {sentence}")
