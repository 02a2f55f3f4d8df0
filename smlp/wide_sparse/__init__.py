"""Mixing layers as wide, sparse layers of an MLP (Hayase and Karakida, 2024)."""
