"""``smlp data dedup``: remove documents that repeat others, and find those that contain zero-shot tasks.

signatures     words, hashes of runs of words, MinHash signatures and the bands that near duplicates share
files          intermediate files of the phases
passes         first phase: hash, signature, bands and overlap with the tasks of every document;
               last phase: write the documents that are kept, and a report of the others
groups         second and third phase: documents of equal hash; documents that share a band and are similar
contamination  n-grams of the zero-shot tasks
command        options, phases, manifest, report
"""
