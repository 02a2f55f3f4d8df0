"""Read options from a fairseq command line before fairseq parses it."""

from __future__ import annotations

from smlp.errors import UserError

_MOST_DIGITS = 18  # Python refuses to read thousands
DEFAULT_ARCH = "smlp_tiny"
TOKENS_PER_BATCH = 4096  # the paper's 4 sequences of 1024 tokens on each rank (Yu et al., 2022, Tables 8 to 10)


def option_value(argv: list[str], *names: str) -> str | None:
    """Return the last value given for an option, as ``--name VALUE``, ``--name=VALUE`` or ``-nVALUE``; None without."""
    value = None
    for position, word in enumerate(argv):
        name, equals, attached = _split(word)
        if name in names:
            if equals:
                value = attached
            elif position + 1 < len(argv):
                value = argv[position + 1]
    return value


def has_option(argv: list[str], *names: str) -> bool:
    """Return whether one of the options is given, as ``--name VALUE``, ``--name=VALUE`` or ``-nVALUE``."""
    return any(_split(word)[0] in names for word in argv)


def _split(word: str) -> tuple[str, bool, str]:
    """Return the name of an option, whether a value is attached to it, and the value."""
    if len(word) > 2 and word[0] == "-" != word[1]:  # argparse takes -nVALUE and -n=VALUE
        return word[:2], True, word[2:].removeprefix("=")
    name, equals, value = word.partition("=")
    return name, bool(equals), value


def positive_number(arguments: list[str], name: str) -> int | None:
    """Return the value of an option; None if it is not given.

    Raises:
        UserError: it is not a number of at least 1, or has too many digits.
    """
    if not has_option(arguments, name):
        return None
    text = option_value(arguments, name) or ""
    if len(text) > _MOST_DIGITS:
        raise UserError(f"{name} needs a number of at most {_MOST_DIGITS} digits, not {text!r:.40}")
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"{name} needs a number of at least 1, not {text!r}")
    return int(text)


def without_options(arguments: list[str], *names: str) -> list[str]:
    """Return the arguments without these options and their values."""
    kept, words = [], iter(arguments)
    for word in words:
        name, equals, _ = word.partition("=")
        if name not in names:
            kept.append(word)
        elif not equals:
            next(words, None)
    return kept


def default_arguments(given: list[str]) -> list[str]:
    """Return the options that a plain call lacks."""
    from smlp.config.presets import PRESETS, preset

    added: list[str] = []
    arch = option_value(given, "--arch", "-a")
    is_encoder = PRESETS.get(arch or DEFAULT_ARCH, {}).get("direction") == "bidirectional"
    if not has_option(given, "--task"):
        added += ["--task", "masked_lm" if is_encoder else "language_modeling"]
    if arch is None:
        arch = DEFAULT_ARCH
        added += ["--arch", arch]
    tokens = option_value(given, "--tokens-per-sample")
    makes_samples = option_value(given, "--task") in (None, "language_modeling", "masked_lm")
    if tokens is None and arch in PRESETS and makes_samples:
        tokens = str(preset(arch).max_tokens)
        added += ["--tokens-per-sample", tokens]
    if not has_option(given, "--batch-size", "--max-sentences", "--max-tokens"):
        if tokens is not None and tokens.isdecimal() and len(tokens) <= _MOST_DIGITS and int(tokens) > 0:
            added += ["--batch-size", str(max(1, TOKENS_PER_BATCH // int(tokens)))]
        else:
            added += ["--max-tokens", str(TOKENS_PER_BATCH)]
    if not has_option(given, "--optimizer"):
        added += ["--optimizer", "adam"]
    if not has_option(given, "--lr"):
        added += ["--lr", "5e-4"]
    return added
