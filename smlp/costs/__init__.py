"""Count what a model costs: parameters, FLOPs, memory and time, and find settings of equal FLOPs."""
