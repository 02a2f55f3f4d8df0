"""Checks of the options about images, without timm."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Sequence

from smlp.errors import UserError

#: default of --momentum
MOMENTUM = 0.9


def check_images(args: Namespace, channels: int | None) -> None:
    """Refuse means, deviations and sizes that images of ``channels`` channels, None if unknown, cannot have.

    Raises:
        UserError: the message names the option and the numbers.
    """
    for option, is_good, about in (
        ("mean", lambda number: math.isfinite(number), "means are finite"),
        ("std", lambda number: 0 < number < math.inf, "deviations are above 0"),
    ):
        numbers = getattr(args, option)
        if numbers is not None and not all(map(is_good, numbers)):
            raise UserError(f"--{option} {listed(numbers)}: {about}")
        if channels is not None and numbers is not None and len(numbers) not in (1, channels):
            raise UserError(
                f"--{option} {listed(numbers)}: images of {channels} channels need {channels} numbers, or one"
            )
    if args.input_size is not None and min(args.input_size) < 1:
        raise UserError(f"--input-size {listed(args.input_size)}: sizes are at least 1")
    if channels is not None and args.input_size is not None and args.input_size[0] != channels:
        raise UserError(f"--input-size {listed(args.input_size)}: --in-chans is {channels}")


def listed(numbers: Sequence[float]) -> str:
    """Return numbers as they stand on a command line."""
    return " ".join(f"{number:g}" for number in numbers)
