"""Training objectives for fairseq, which does not import this folder of a plug-in by itself: ``smlp.models`` does."""
