"""``smlp data dedup``: remove documents that repeat others, and find those that contain zero-shot tasks.

signatures     words, hashes of runs of words, MinHash signatures and the bands that near duplicates share
files          what the phases leave for each other, on disk
passes         first phase: hash, signature, bands and overlap with the tasks of every document;
               last phase: write the documents that are kept, and what became of the others
groups         second and third phase: documents of equal hash; documents that share a band and are alike
contamination  n-grams of the zero-shot tasks
command        options, phases, manifest, report
"""
