"""``smlp compare report``: tables and figures of an experiment, from its folder alone (docs/compare.md).

:mod:`~smlp.experiments.report.runs` reads the folder, and forgives what is missing or half done; the modules of tables
take what was read and give :class:`~smlp.experiments.report.table.Table` records, each number with the file and field
that it comes from; those of figures draw; :mod:`~smlp.experiments.report.write` puts everything into files.
"""
