"""``smlp data glue`` and ``smlp data squad``: data for fine-tuning, of the benchmarks or of one's own."""
