"""``smlp data dedup``: documents that say again what another one says, and documents that hold zero-shot tasks.

words          a text as words and hashes of runs of words
signatures     MinHash signatures and the bands that near duplicates share
spill          rows on disk, by partitions of their keys
files          what the phases leave for each other
sign           first phase: every document's hash, signature, bands, and overlap with the tasks
groups         second and third: documents of equal hash; documents that share a band and are alike
components     pairs of duplicates to one document that is kept
write          last phase: documents that are kept, and what became of the others
contamination  n-grams of the zero-shot tasks
command        options, phases, manifest
"""
