"""How a text is cut into samples, against fairseq's own datasets, and what its tokens stand for."""

from __future__ import annotations

import dataclasses
import types

import numpy as np
import pytest
import sentencepiece
import torch
from fairseq.data import Dictionary, LMContextWindowDataset, MonolingualDataset, TokenBlockDataset

import smlp
from data_prep.tokenize.models import train_sentencepiece
from smlp.errors import UserError
from smlp.evaluation.leak import randomise
from smlp.evaluation.report import decoded_sizes, documents_of, original_sizes, tokens_of
from smlp.evaluation.samples import Cutting, cut
from smlp.evaluation.scoring import score_samples
from smlp.launch.team import Team
from smlp.text.binarized import BinarizedTokens
from smlp.text.tokenizer import Tokenizer, Vocabulary

CONTEXT = 12
LENGTHS = [5, 1, 1, 7, 12, 2, 3, 1, 4, 13, 9, 1, 1, 6, 2, 8]


def stream(lengths=LENGTHS) -> BinarizedTokens:
    """Random tokens; every line ends in </s>, except those of 2, 3 and 8 tokens."""
    tokens, lengths = np.random.default_rng(0).integers(4, 40, sum(lengths)), np.array(lengths, dtype=np.int32)
    tokens[(np.cumsum(lengths) - 1)[~np.isin(lengths, (2, 3, 8))]] = Vocabulary.eos
    return BinarizedTokens(tokens, lengths)


def of_fairseq(mode: str, size: int, window: int, has_bos: bool) -> list[tuple[list[int], list[int], int]]:
    """Inputs, targets and the first scored position of each sample, in the order of the text."""
    dictionary, text = Dictionary(), stream()
    for number in range(4, 40):
        dictionary.add_symbol(f"w{number}")
    lines = [torch.from_numpy(line) for line in np.split(text.tokens, np.cumsum(text.lengths)[:-1])]
    pad, eos = dictionary.pad(), dictionary.eos()
    blocks = TokenBlockDataset(lines, text.lengths, size - window, pad, eos, break_mode=mode, include_targets=True)
    samples = MonolingualDataset(
        blocks, blocks.sizes, dictionary, shuffle=False, targets=["future"], add_bos_token=has_bos
    )
    kept = [index for index in range(len(samples)) if samples.size(index) + has_bos <= CONTEXT]
    if window:
        samples = LMContextWindowDataset(samples, size - window, window, pad)
    batches = [samples.collater([samples[index]]) for index in kept]
    found = []
    for batch in batches:
        sources, targets = (x[0][x[0] != pad].tolist() for x in (batch["net_input"]["src_tokens"], batch["target"]))
        found.append((sources, targets, batch.get("start_indices", [0])[0]))
    return found


@pytest.mark.filterwarnings("ignore:overflow encountered")  # fairseq's, in targets that nobody uses
@pytest.mark.parametrize("has_bos", [False, True])
@pytest.mark.parametrize("window", [0, 3, 7])
@pytest.mark.parametrize("mode", ["none", "eos", "complete", "complete_doc"])
def test_samples_are_those_of_fairseq(mode, window, has_bos, monkeypatch):
    monkeypatch.setattr(np, "compat", types.SimpleNamespace(long=np.int64), raising=False)
    size, text = CONTEXT - has_bos, stream()
    start = Vocabulary.bos if has_bos else Vocabulary.eos
    cutting = Cutting(CONTEXT, size, mode, window, start_token=start)
    samples = cut(text.tokens, text.lengths, cutting)
    expected = of_fairseq(mode, size, window, has_bos)
    assert len(samples) == len(expected) > 3
    for number, (sources, targets, first) in enumerate(expected):
        batch = samples.batch(np.array([number]))
        assert batch.sources_Bn[0].tolist() == sources
        assert batch.targets_Bn[0, first:].tolist() == targets
        places = batch.places_Bn[0].numpy()
        assert (places >= 0).nonzero()[0].tolist() == list(range(first + has_bos, len(sources)))
        assert text.tokens[places[places >= 0]].tolist() == targets[int(has_bos) :]


def test_batches_hold_what_they_may_and_every_scored_sample_once():
    text = stream()
    samples = cut(text.tokens, text.lengths, Cutting(CONTEXT, CONTEXT, "eos", prefix=3))
    scored = [number for number, length in enumerate(samples.lengths_S) if length > 3]
    for batch_size, max_tokens in ((1, None), (3, None), (None, 24), (4, 24), (None, 1), (None, None)):
        batches = samples.batches(batch_size, max_tokens)
        assert sorted(np.concatenate(batches)) == scored
        for numbers in batches:
            shape = samples.batch(numbers).sources_Bn.shape
            assert len(numbers) <= (batch_size or 99) and (len(numbers) == 1 or np.prod(shape) <= (max_tokens or 999))
    assert len(samples.batches(4, 24)) < len(samples.batches(1))
    assert not any(samples.up_to(len(text.tokens)).batch(np.zeros(0, dtype=int)).sources_Bn.shape[:1])
    assert samples.up_to(7).end_S[-1] == 7 and samples.up_to(8).end_S[-1] == 14
    by_line = Cutting(CONTEXT + 2, CONTEXT, break_mode="eos")
    for number in (1, 5, 6, 30):  # a symbol before each sample is no token of the text
        with_bos = cut(text.tokens, text.lengths, dataclasses.replace(by_line, start_token=Vocabulary.bos))
        assert with_bos.up_to(number).num_scored == cut(text.tokens, text.lengths, by_line).up_to(number).num_scored


@pytest.mark.parametrize("arch", ["smlp_partial_tiny", "gshard_lm_tiny", "hash_lm_tiny"])
def test_scores_do_not_depend_on_batches(arch):
    config = {"vocab_size": 40, "max_tokens": CONTEXT, "embed_dim": 16, "ffn_dim": 16, "num_experts": 4}
    decoder, text = randomise(smlp.build(arch, **config)).eval(), stream()
    cutting = Cutting(CONTEXT, CONTEXT, "eos", 4, decoder.config.prefix_tokens)
    samples = cut(text.tokens, text.lengths, cutting)
    one, all_ = (
        score_samples(decoder, samples, samples.batches(batch_size), len(text.tokens)) for batch_size in (1, None)
    )
    np.testing.assert_allclose(one.log_probs_N, all_.log_probs_N, rtol=1e-4, atol=1e-4)
    assert 0 < np.isnan(one.log_probs_N).sum() < len(text.tokens)
    with torch.no_grad():
        decoder.norm.weight.fill_(torch.nan)
    with pytest.raises(UserError, match="tokens are NaN"):
        score_samples(decoder, samples, samples.batches(), len(text.tokens))


def test_infinite_predictions_are_refused(monkeypatch):
    """As of float16, where a logit overflows: a loss of infinity is no result, and JSON has no such number."""
    decoder, text = smlp.build("gmlp_lm_tiny", vocab_size=40, max_tokens=CONTEXT, embed_dim=16).eval(), stream()
    logits_of, unlikely = decoder.project, torch.tensor([int(text.tokens[0])])
    monkeypatch.setattr(decoder, "project", lambda x: logits_of(x).index_fill(-1, unlikely, -torch.inf))
    samples = cut(text.tokens, text.lengths, Cutting(CONTEXT, CONTEXT))
    with pytest.raises(UserError, match=r"predictions of \d+ tokens are NaN or infinite"):
        score_samples(decoder, samples, samples.batches(), len(text.tokens))


class Lonely(Team):
    """A rank that hears nothing of the others."""

    def gather(self, part):
        return [part]


def test_ranks_share_the_batches():
    config = {"vocab_size": 40, "max_tokens": CONTEXT, "embed_dim": 16, "ffn_dim": 16, "num_experts": 4}
    decoder, text = smlp.build("smlp_tiny", **config).eval(), stream()
    samples = cut(text.tokens, text.lengths, Cutting(CONTEXT, CONTEXT))
    batches, seen = samples.batches(1), []
    parts = [
        score_samples(decoder, samples, batches, len(text.tokens), Lonely(rank, 4), in_step, seen.append).log_probs_N
        for rank in range(4)
        for in_step in (False, True)
    ]
    assert len(batches) == 7 and len(seen) == 7 + 8 and seen[-1].num_seqs == 0
    assert (~np.isnan(parts)).sum(axis=0).tolist() == [2] * len(text.tokens)


@pytest.mark.parametrize(
    ("size", "window", "words"),
    [(13, 0, "--tokens-per-sample 13 .* context of 12 tokens"), (0, 0, "at least 1"), (8, 8, "--context-window 8"),
     (8, -1, "--context-window -1")],
)  # fmt: skip
def test_sizes_that_do_not_fit_are_refused(size, window, words):
    with pytest.raises(UserError, match=words):
        Cutting(12, size, context_window=window)


LINES = ["the cat sat on the mat", "", "", "a  cat and a dog", "über dem Café", "the mat", "", "the end of it"]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory) -> dict[str, Tokenizer]:
    """One that splits at spaces and does not know every word, and one with pieces."""
    path = tmp_path_factory.mktemp("pieces") / "sentencepiece.model"
    path.write_bytes(train_sentencepiece([line for line in LINES * 3 if "end" not in line], 30))
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(path))
    symbols = [pieces.id_to_piece(number) for number in range(3, pieces.vocab_size())]
    words = sorted({word for line in LINES[:-1] for word in line.split()})
    return {"words": Tokenizer(Vocabulary(words)), "pieces": Tokenizer(Vocabulary(symbols), path)}


@pytest.mark.parametrize("kind", ["words", "pieces"])
def test_tokens_stand_for_the_words_and_bytes_that_they_decode_to(tokenizers, kind):
    tokenizer = tokenizers[kind]
    text = tokens_of(LINES, tokenizer)
    assert text.lengths.tolist() == [len(tokenizer.encode(line)) + 1 for line in LINES] and text.lengths[1] == 1
    assert (text.tokens[np.cumsum(text.lengths) - 1] == Vocabulary.eos).all()
    sizes = decoded_sizes(text, tokenizer)
    starts = np.cumsum(text.lengths) - text.lengths
    lines = [tokenizer.decode(line[:-1].tolist()) for line in np.split(text.tokens, starts[1:])]
    assert np.add.reduceat(sizes.words_N, starts).tolist() == [len(line.split()) for line in lines]
    assert np.add.reduceat(sizes.bytes_N, starts).tolist() == [len(line.encode()) + 1 for line in lines]
    assert sizes.words_N.sum() == sum(len(line.split()) for line in LINES) and sizes.words_N.max() == 1
    original = original_sizes(LINES, text)
    assert np.add.reduceat(original.bytes_N, starts).tolist() == [len(line.encode()) + 1 for line in LINES]
    assert original.words_N.sum() == sizes.words_N.sum()
    with pytest.raises(UserError, match="--text has 7 lines, but the data have 8"):
        original_sizes(LINES[1:], text)


def test_lines_of_no_token_have_their_sizes_and_end_documents(tokenizers):
    """Builders that put no </s> at a line's end write empty lines without tokens."""
    lines, tokenizer = ["", "the mat", "", "a dog", ""], tokenizers["words"]
    whole = tokens_of(lines, tokenizer)
    text = BinarizedTokens(np.delete(whole.tokens, [0, 4, 8]), np.where(whole.lengths == 1, 0, whole.lengths))
    original = original_sizes(lines, text)
    assert original.words_N.tolist() == [0, 0, 2, 0, 0, 2] and original.bytes_N.tolist() == [1, 0, 9, 0, 0, 7]
    assert decoded_sizes(text, tokenizer).words_N.tolist() == [1, 1, 0, 1, 1, 0]
    for kind in ("line", "empty-line"):
        assert documents_of(text, kind).tolist() == [0, 0, 0, 1, 1, 1]


def test_white_space_within_a_line_counts_but_for_the_space_that_begins_it():
    """Whether indentation is one piece or several, and at the end of a line too."""
    contents = {2: b"\n", 4: b" ", 5: b"    ", 6: b" foo", 7: b" bar"}
    tokenizer = types.SimpleNamespace(strips_lines=True, content=contents.__getitem__)
    lines = [[4, 4, 4, 4, 6, 7, 2], [5, 6, 7, 2], [6, 7, 4, 4, 2]]
    text = BinarizedTokens(np.concatenate(lines), np.array(list(map(len, lines)), dtype=np.int32))
    sizes, starts = decoded_sizes(text, tokenizer), np.cumsum(text.lengths) - text.lengths
    assert np.add.reduceat(sizes.bytes_N, starts).tolist() == [12, 12, 10] and sizes.words_N.sum() == 6


def test_documents():
    lengths = [1, 3, 4, 1, 1, 2, 1, 5]
    text = stream(lengths)
    by_line = np.split(documents_of(text, "empty-line"), np.cumsum(lengths)[:-1])
    assert [set(numbers) for numbers in by_line] == [{0}, {0}, {0}, {0}, {0}, {1}, {1}, {2}]
    assert documents_of(text, "line").tolist() == np.repeat(np.arange(8), lengths).tolist()
    text.tokens[8:10] = 7  # lines of one token that are not empty
    assert documents_of(text, "empty-line").tolist() == [0] * 13 + [1] * 5
