"""``smlp data sample``: draw documents by their hashes, mix them by weights, split them into train/valid/test.

:mod:`.survey` records hash and size of every document; :mod:`.plan` finds from that where to cut, reads the documents
again and puts each where it belongs.
"""
