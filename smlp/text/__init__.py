"""Text as ids: dictionaries, tokenizers, files of token ids, n-gram models of them."""
