"""What the commands' arguments may be; argparse prints the errors and exits with 2."""

from __future__ import annotations

import argparse
import math


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
