"""Text for training, from raw corpora to fairseq's binary shards.

Each step of ``smlp data`` is a folder (``tokenize`` is the step ``tokenizer``, ``inspecting`` is ``inspect``) with a
``command`` module; ``glue`` and ``squad`` are modules of ``finetuning``. ``flow`` is what the steps share.
``python_docs`` and ``text_files`` are command lines of their own, which build the small corpora of the quickstart.
"""
