"""``smlp data sample``: a part of the documents, drawn by their hashes, mixed by weights, split into train/valid/test.

:mod:`.survey` writes down hash and size of every document; :mod:`.plan` finds from that where to cut, reads the
documents again and puts each where it belongs.
"""
