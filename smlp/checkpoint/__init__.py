"""Reading and writing checkpoints."""

import argparse

import torch

# Since torch 2.6 torch.load admits tensors and plain values only. A checkpoint of a model, task or optimizer that is
# registered without a dataclass also holds an argparse.Namespace, which is a plain record: admit it by name.
torch.serialization.add_safe_globals([argparse.Namespace])
