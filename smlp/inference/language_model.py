"""A trained model with its dictionary and tokenizer: what scripts and notebooks work with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from numbers import Integral
from typing import Any

from torch import Tensor, nn

from smlp.config.settings import require
from smlp.errors import UserError
from smlp.inference.generation import BeamSearch, Continuation, Limits, Sampling, TextWriter, method_of
from smlp.inference.scoring.candidates import TextScore, drop_nothing, score_texts
from smlp.inference.scoring.texts import Encoding
from smlp.nn.decoder import Decoder, DecoderOutput
from smlp.nn.state import DecodingState
from smlp.text.tokenizer import Tokenizer, Vocabulary

Method = Sampling | BeamSearch


class LanguageModel(nn.Module):
    """A trained decoder with its dictionary and tokenizer."""

    def __init__(self, decoder: Decoder, tokenizer: Tokenizer, start_token: int = Vocabulary.eos) -> None:
        super().__init__()
        self.decoder = decoder
        self.tokenizer = tokenizer
        #: first token of every training sample: ``</s>``, or ``<s>`` after training with --add-bos-token
        self.start_token = start_token

    @property
    def core(self) -> Decoder:
        """The model without its tokenizer; every kind of trained model has this property."""
        return self.decoder

    @property
    def vocabulary(self) -> Vocabulary:
        """Symbols and ids."""
        return self.tokenizer.vocabulary

    def forward(self, tokens_Bn: Tensor, state: DecodingState | None = None) -> DecoderOutput:
        """Return the next-token logits (B, n, V); see :meth:`smlp.nn.decoder.Decoder.forward`."""
        return self.decoder(tokens_Bn, state)

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text, without the start symbol, which is put before every prompt automatically.

        What the dictionary lacks becomes ``<unk>``; a line break becomes ``</s>``, which ends each line in training.
        """
        return self.tokenizer.encode_lines(text)

    def detokenize(self, tokens: Iterable[int]) -> str:
        """Return the text of ids; ``</s>`` ends a line."""
        return self.tokenizer.decode(tokens)

    def encoding(self, newline: str = "eos", fill_prefix: bool = False) -> Encoding:
        """Return how texts become ids that this model reads; arguments as in :meth:`score`."""
        return Encoding(self.tokenizer, self.decoder.config, self.start_token, newline, fill_prefix)

    def score(
        self,
        texts: str | tuple[str, str] | Sequence[str | tuple[str, str]],
        *,
        newline: str = "eos",
        fill_prefix: bool = False,
        batch_tokens: int = 8192,
    ) -> TextScore | list[TextScore]:
        """Return the log-probabilities of a text, or of each of several; of a pair, those of its second text after its
        first::

            lm.score("The module is imported.").perplexity
            lm.score([("The sun", " rises."), ("The sun", " sings.")])[0].log_prob

        A text does not depend on what else is scored: no expert drops a token from now on, whatever
        ``eval_capacity_factor`` the model was trained with.

        Args:
            texts: one or several; each a text, or a context and what follows it.
            newline: what a line break becomes: ``"eos"``, the end of a line in training, or ``"space"``.
            fill_prefix: put start symbols before contexts shorter than the prefix of a model with partial routing.
            batch_tokens: positions in a batch.

        Returns:
            the score of each text (:class:`smlp.inference.scoring.candidates.TextScore`): its ids, the natural
            log-probability of each, their sum and perplexity; one for one text, a list for several.

        Raises:
            UserError: a text has no token, or is longer than the model's context, or begins within the prefix.
        """
        alone = isinstance(texts, str | tuple) or not isinstance(texts, Iterable)
        pairs = [("", text) if isinstance(text, str) else text for text in ([texts] if alone else texts)]
        for pair in pairs:
            if not isinstance(pair, Sequence) or len(pair) != 2 or not all(isinstance(one, str) for one in pair):
                raise UserError(f"texts to score must be strings, or pairs of a context and a string, got {pair!r:.80}")
        if not isinstance(batch_tokens, Integral) or batch_tokens < 1:
            raise UserError(f"batch_tokens must be a whole number of at least 1, got {batch_tokens!r}")
        drop_nothing(self.decoder)
        found = score_texts(self.decoder, self.encoding(newline, fill_prefix), pairs, batch_tokens)
        return found[0] if alone else found

    def generate(
        self, prompt: str | Sequence[str], max_tokens: int = 50, method: Method | None = None, **options: Any
    ) -> str | list[str] | list[list[str]]:
        """Continue a prompt, or each of several, with at most ``max_tokens`` new tokens; return the new text.

        Takes the options of :meth:`continuations`, which returns more than the text::

            lm.generate("The module", max_tokens=30, temperature=0.8, top_p=0.9)
            lm.generate(["The module", "A class"], greedy=True, stop=["\\n"])
            lm.generate("The module", num_return=3, seed=7)
            lm.generate("The module", beam=5)

        Returns:
            a string for one prompt, a list of them for several; with ``num_return`` above one, a list in place of each
            string.

        Raises:
            UserError: as :meth:`continuations`.
        """
        prompts = [prompt] if isinstance(prompt, str) else prompt
        texts = [[one.text for one in found] for found in self.continuations(prompts, max_tokens, method, **options)]
        if options.get("num_return", 1) == 1:
            texts = [text for (text,) in texts]
        return texts[0] if isinstance(prompt, str) else texts

    def continuations(
        self,
        prompts: Sequence[str],
        max_tokens: int = 50,
        method: Method | None = None,
        *,
        num_return: int = 1,
        batch_size: int = 16,
        **options: Any,
    ) -> Iterator[list[Continuation]]:
        """Return the continuations of each prompt with their ids, log-probabilities and reasons for ending, in order.

        A text does not depend on what else is in its batch, except in a model with ``eval_capacity_factor``. It is
        written while the iterator is read; prompts that do not fit are refused at once.

        Args:
            prompts: texts; they may be empty.
            max_tokens: most new tokens of each.
            method: how tokens are chosen; by default, as the settings among ``options`` say.
            num_return: texts for each prompt, drawn with other random numbers; with beam search the best ones.
            batch_size: prompts at a time.
            **options: of :meth:`writer`.

        Raises:
            UserError: a setting is out of range or cannot be combined with another, or a prompt does not fit the model.
        """
        writer = self.writer(max_tokens, method, num_return=num_return, **options)
        return writer.continuations(prompts, batch_size)

    def stream(
        self, prompt: str, max_tokens: int = 50, method: Sampling | None = None, **options: Any
    ) -> Iterator[str]:
        """Return the continuation of a prompt, piece by piece; options are those of :meth:`writer`.

        Text that may be the beginning of a stop string is held back until that is decided.

        Raises:
            UserError: as :meth:`continuations`; also for a beam search, which has no text before its end, and for
                several texts.
        """
        if options.get("num_return", 1) != 1:
            raise UserError(f"a stream is one text, so that num_return must be 1, got {options['num_return']!r}")
        writer = self.writer(max_tokens, method, **options)
        return (new for _, new in writer.follow([writer.prompt_tokens(prompt)]) if new)

    def writer(
        self,
        max_tokens: int = 50,
        method: Method | None = None,
        *,
        stop: str | Sequence[str] = (),
        stop_at_eos: bool = False,
        min_tokens: int = 0,
        when_full: str = "refuse",
        num_return: int = 1,
        fill_prefix: bool = False,
        **settings: Any,
    ) -> TextWriter:
        """Return a writer that continues prompts in one way.

        Args:
            max_tokens: most new tokens of a text.
            method: how tokens are chosen; by default drawn from the model's whole distribution.
            stop: a string, or several: a text ends before the first one that occurs.
            stop_at_eos: end a text at ``</s>``, the end of a line or document in the training data, instead of going on
                with the next line. Beam search always does so.
            min_tokens: ``</s>`` ends a text only after this many new tokens.
            when_full: where a text needs more than the model's context: "refuse", "stop" it there, or "slide" (forget
                the earlier half and go on).
            num_return: texts for each prompt.
            fill_prefix: put start symbols before a prompt that is too short for a model with partial routing.
            **settings: instead of ``method``: ``temperature``, ``top_k``, ``top_p``, ``repetition_penalty``, ``seed``
                (see :class:`smlp.inference.generation.Sampling`), ``greedy=True``, or ``beam=5``, ``length_penalty``.

        Raises:
            UserError: a value is out of range, or options cannot be combined.
        """
        for name, value in (("fill_prefix", fill_prefix), ("stop_at_eos", stop_at_eos)):
            require(value in (True, False), f"{name} must be True or False, got {value!r}")
        if method is None:
            method = method_of(**settings)
        elif settings:
            raise UserError(f"{', '.join(settings)}: give these settings to the method, or give no method")
        ends = stop_at_eos or isinstance(method, BeamSearch)
        limits = Limits(max_tokens, min_tokens, Vocabulary.eos if ends else None, when_full)
        stops = tuple(stop) if isinstance(stop, Iterable) and not isinstance(stop, str) else (stop,)
        return TextWriter(
            self.decoder, self.tokenizer, self.start_token, method, limits, stops, num_return, fill_prefix
        )
