"""Modules of the decoder and the encoder, from shared layers up."""
