"""The foundation of every step of ``smlp data``: streams, documents, parts, manifests, workers.

A step reads files of documents (:mod:`.documents`), cut into parts (:mod:`.parts`), works on each part once
(:mod:`.running`), in parallel (:mod:`.workers`), writes each of its files whole or not at all (:mod:`.streams`), and
records inputs, outputs and counts in ``manifest.json`` (:mod:`.manifest`).
"""
