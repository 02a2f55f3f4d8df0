"""``smlp data fetch``: download published corpora and turn them into documents for ``smlp data clean``.

A source (:mod:`.source`) says where its files are and what format they have. They are listed (:mod:`.listing`),
downloaded (:mod:`.download`) into ``OUT/.raw/SOURCE`` and turned into documents in ``OUT/SOURCE`` (:mod:`.wikipedia`,
:mod:`.warc` and :mod:`.hub`). :mod:`.sequence` does one after the other, once :mod:`.wanted` has checked that it can be
done.
"""
