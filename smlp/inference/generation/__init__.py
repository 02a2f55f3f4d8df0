"""Writing text: sampling and beam search over batches of prompts, with cached state."""

from smlp.inference.generation.beam import beam_search
from smlp.inference.generation.continuations import Continuation, ShownText, TextWriter
from smlp.inference.generation.prompts import Text
from smlp.inference.generation.sampled import Request, SampledBatch, generate, likeliest, sampled_texts
from smlp.inference.generation.settings import BeamSearch, Limits, Sampling, method_of

__all__ = [
    "BeamSearch",
    "Continuation",
    "Limits",
    "Request",
    "SampledBatch",
    "Sampling",
    "ShownText",
    "Text",
    "TextWriter",
    "beam_search",
    "generate",
    "likeliest",
    "method_of",
    "sampled_texts",
]
