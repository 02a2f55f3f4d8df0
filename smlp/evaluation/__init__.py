"""Scoring: n-gram baselines on a model's own tokens, perplexities, training curves."""
