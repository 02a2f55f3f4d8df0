"""``smlp data fetch``: corpora from where they are published, as documents for ``smlp data clean``.

A source (:mod:`.source`) says where its files are and what they are made of. They are listed (:mod:`.listing`),
downloaded (:mod:`.download`) into ``OUT/.raw/SOURCE`` and turned into documents (:mod:`.convert`,
with :mod:`.wikipedia`, :mod:`.warc` and :mod:`.hub`) in ``OUT/SOURCE``; :mod:`.sequence` does one after the other.
"""
