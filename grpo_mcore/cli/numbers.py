"""Types of options: what is no such number or path is refused with the command's usage."""

import argparse
import math


def local(text: str) -> str:
    """Return a path, or a name on the hub. Commands read folders: a URL is refused."""
    if "://" in text:
        raise argparse.ArgumentTypeError(
            f"{text} is a URL; fetch the run first, then name its folder: grpo-mcore fetch {text} --to FOLDER"
        )
    return text


def count(text: str) -> int:
    """Return a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number of at least 1 is needed, got {text!r}")
    return int(text)


def amount(text: str) -> float:
    """Return a number above 0."""
    if (value := finite(text)) <= 0:
        raise argparse.ArgumentTypeError(f"a number above 0 is needed, got {text!r}")
    return value


def finite(text: str) -> float:
    """Return a number that is neither infinite nor NaN, nor becomes infinite in another unit."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not abs(value) < 1e100:
        raise argparse.ArgumentTypeError(f"a finite number is needed, got {text!r}")
    return value
