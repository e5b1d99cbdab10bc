"""What the commands' arguments may be; argparse prints the errors and exits with 2."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def positive(text: str) -> int:
    """Read a whole number above 0.

    Raises:
        argparse.ArgumentTypeError: It is none.
    """
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def positive_time(text: str) -> float:
    """Read a finite time above 0, in whatever unit.

    Raises:
        argparse.ArgumentTypeError: It is none.
    """
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time above 0")
    return value


def whole(low: int, high: int) -> Callable[[str], int]:
    """Return what reads a whole number from ``low``, not negative, to ``high``."""

    def read(text: str) -> int:
        value = int(text) if text.isdecimal() else -1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {low} to {high}")
        return value

    return read


def between(low: float, high: float) -> Callable[[str], float]:
    """Return what reads a number from ``low`` to ``high``."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is no number") from error
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not between {low:,} and {high:,}")
        return value

    return read
