"""Perplexities of streams of tokens, leaks, n-gram baselines on the same tokens, training curves."""
