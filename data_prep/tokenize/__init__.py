"""``smlp data tokenizer``: SentencePiece or byte-level BPE from a sample of the training text, and its dictionary."""
