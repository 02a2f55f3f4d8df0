"""Text for training: build a corpus, train its vocabulary, hand it to fairseq's own binariser.

``python_docs`` or ``text_files`` write ``train.txt``, ``valid.txt`` and ``test.txt``; ``tokenizer`` turns them into
SentencePiece pieces; ``binarize`` calls ``fairseq-preprocess``. Each is a module with a command line of its own.
"""
