"""``smlp data dedup``: documents that say again what another one says, and documents that hold zero-shot tasks.

signatures     a text as words, hashes of runs of words, MinHash signatures and the bands that near duplicates share
files          what the phases leave for each other, on disk
passes         first phase: every document's hash, signature, bands, and overlap with the tasks;
               last phase: documents that are kept, and what became of the others
groups         second and third: documents of equal hash; documents that share a band and are alike; who is kept
contamination  n-grams of the zero-shot tasks
command        options, phases, manifest, report
"""
