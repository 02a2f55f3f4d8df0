"""Mixing layers as wide, sparse layers of an MLP (Hayase and Karakida, 2024: mixer_wide_sparse.txt)."""
