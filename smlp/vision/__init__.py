"""Image classifiers: MLP-Mixer (Tolstikhin et al., 2021) and gMLP (Liu et al., 2021); the models need torch only."""
