"""Modules of the decoder, from the spatial gating unit up."""
