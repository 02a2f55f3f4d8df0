"""``smlp generate --interactive``: a person and a model write a text in turns."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import sys

from smlp.errors import UserError, one_line
from smlp.inference.generation import Sampling, Text, TextWriter
from smlp.text.tokenizer import Vocabulary

HELP = """Type a line: the model continues the text so far, your line last. An empty line lets it go on.
  /reset            forget the text so far
  /set              show the settings
  /set NAME VALUE   change one, such as: /set temperature 0.7
  /help, /quit
Ctrl-C stops an answer; the end of input (Ctrl-D) ends the loop."""

_KINDS = {"int": int, "float": float}
_SWITCH = {"on": True, "off": False}


class PromptLoop:
    """Reads lines from standard input and writes answers to standard output.

    The context of an answer is everything that was typed and written so far, each line ended by ``</s>``. When too few
    positions are left for an answer, the earlier half is forgotten.
    """

    def __init__(self, writer: TextWriter) -> None:
        self._writer = writer
        self._tokens = [writer.start_token]

    def run(self) -> int:
        """Run until the end of input, or /quit; return 0."""
        if sys.stdin.isatty():
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  enables arrow keys and history
            print("/help shows what can be typed here.")
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="surrogateescape")  # else a bad byte takes the lines around it with it
        while True:
            try:
                line = input("> ").strip()
            except EOFError:
                print()
                return 0
            except KeyboardInterrupt:
                print()
                continue
            if line.split()[:1] == ["/quit"]:
                return 0
            try:
                if line.startswith("/"):
                    self._obey(line)
                else:
                    self._answer(line)
            except UserError as error:
                print(f"({one_line(error)})")

    def _obey(self, line: str) -> None:
        command, *words = line.split(maxsplit=2)
        if command == "/help":
            print(HELP)
        elif command == "/reset":
            self._tokens = [self._writer.start_token]
            print("(the text so far is forgotten)")
        elif command == "/set":
            if words:
                self._set(words[0], words[1] if len(words) > 1 else "")
            print("(" + ", ".join(f"{name} {value}" for name, value in self._settings().items()) + ")")
        else:
            raise UserError(f"there is no command {command}: /help lists the commands")

    def _settings(self) -> dict[str, str]:
        limits, stops = self._writer.limits, self._writer.stop
        return {
            **{name: str(value) for name, value in dataclasses.asdict(self._writer.method).items()},
            "max_tokens": str(limits.max_tokens),
            "min_tokens": str(limits.min_tokens),
            "stop_at_eos": "off" if limits.end is None else "on",
            "stop": ", ".join(map(repr, stops)) or "nothing",
        }

    def _set(self, name: str, value: str) -> None:
        writer, kinds = self._writer, {field.name: field.type for field in dataclasses.fields(Sampling)}
        if name == "stop":
            stops = (value.replace("\\n", "\n"),) if value else ()
            self._writer = dataclasses.replace(writer, stop=stops)
        elif name == "stop_at_eos":
            if value not in _SWITCH:
                raise UserError(f"stop_at_eos is on or off, not {value!r}")
            end = writer.tokenizer.vocabulary.eos if _SWITCH[value] else None
            least = writer.limits.min_tokens if _SWITCH[value] else 0
            limits = dataclasses.replace(writer.limits, end=end, min_tokens=least)
            self._writer = dataclasses.replace(writer, limits=limits)
        elif name in ("max_tokens", "min_tokens"):
            limits = dataclasses.replace(writer.limits, **{name: _number(name, "int", value)})
            self._writer = dataclasses.replace(writer, limits=limits)
        elif name in kinds:
            method = dataclasses.replace(writer.method, **{name: _number(name, kinds[name], value)})
            self._writer = dataclasses.replace(writer, method=method)
        else:
            raise UserError(f"there is no setting {name!r}; there are {', '.join(self._settings())}")

    def _answer(self, line: str) -> None:
        """Continue the text; a line that the model cannot continue leaves the text as it was."""
        writer, end = self._writer, self._writer.tokenizer.vocabulary.eos
        tokens = list(self._tokens)
        if line:
            tokens += [end] if len(tokens) > 1 and tokens[-1] != end else []
            tokens += writer.tokenizer.encode(line)
        tokens = self._fitted(tokens)
        texts = writer.follow([tokens])
        written, shown = Text(0), ""
        try:
            for written, new in texts:  # noqa: B007  used after the loop
                print(new if shown else new.lstrip(" "), end="", flush=True)
                shown += new
        except KeyboardInterrupt:
            print(" (stopped)", end="")
        print()
        answer = written.tokens
        if written.finish == "stop":  # a stop string is neither shown nor part of the text
            text = shown.encode()
            while text and not text[:1].isspace() and tokens and tokens[-1] > Vocabulary.unk:
                text = writer.tokenizer.content(tokens.pop()) + text  # of the word that the answer continues
            answer = writer.tokenizer.encode_lines(text.decode("utf-8", "replace"))
        self._tokens = tokens + answer

    def _fitted(self, tokens: list[int]) -> list[int]:
        """Return the tokens, without the earlier half if they leave too few positions for an answer."""
        config = self._writer.decoder.config
        half = max(config.max_tokens // 2, config.prefix_tokens + 1)
        most = max(half, config.max_tokens + 1 - self._writer.limits.max_tokens)
        if len(tokens) <= most:
            return tokens
        print(f"(the context is full: of {len(tokens)} tokens of text, the first {len(tokens) - half} are forgotten)")
        return tokens[-half:]


def _number(name: str, kind: str, value: str) -> int | float:
    try:
        return _KINDS[kind](value)
    except ValueError:
        raise UserError(f"{name} must be a number ({kind}), not {value!r}") from None
