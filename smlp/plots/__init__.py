"""Numbers and pictures of what a trained model has learned: spatial filters, and what goes to which expert.

The numbers (:mod:`~smlp.plots.filters`, :mod:`~smlp.plots.routing`) need numpy and torch
alone. Drawing needs matplotlib (the extra ``plots``), which is imported only then. ``smlp plot weights`` does
all of it for a checkpoint, and so does :func:`smlp.plots.weights.plot_weights`.
"""
