"""``smlp data clean``: documents of any origin to plain paragraphs of one language.

characters  rules that change characters: entities, mojibake, control characters, NFC, whitespace
lines       rules that remove lines: notices, menus, repeated lines
filters     rules that drop documents: length, symbols, repetition, language
cleaner     all of them in their order, with counts
command     options, parts, manifest
"""
