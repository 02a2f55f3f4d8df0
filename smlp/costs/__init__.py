"""What a model costs: parameters and FLOPs by formula, by fvcore on the real module, and settings of equal FLOPs."""
