"""Trained models at work: loading one with its tokenizer, generating text, scoring texts."""
