"""``smlp data binarize``: text into fairseq's binary shards."""
