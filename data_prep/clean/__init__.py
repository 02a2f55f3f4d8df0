"""``smlp data clean``: turn documents of any origin into plain paragraphs of one language.

rules    of characters: entities, mojibake, control characters, NFC, whitespace;
         of lines: notices, menus, repeated lines
filters  rules that drop documents: length, symbols, repetition, language
cleaner  all of them in their order, with counts
command  options, parts, manifest
"""
