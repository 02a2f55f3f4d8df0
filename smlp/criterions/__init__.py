"""Training objectives for fairseq. It never imports this folder of a plug-in by itself: ``smlp.models`` does."""
