"""``echo2-scenario new``: write a story to begin with."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

from echo2p2p.net.program import FAILED, OK, USAGE

TEMPLATE: Final = Path(__file__).parent / "template.toml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command understands."""
    parser.add_argument("name", help="of the story; its file is NAME.toml")


def main(arguments: argparse.Namespace) -> int:
    """Write a commented story that runs as it is."""
    path = Path(arguments.name.removesuffix(".toml") + ".toml")
    text = TEMPLATE.read_text(encoding="utf-8").replace("{name}", path.stem)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        print(f"error: {path} exists: choose another name, or remove it", file=sys.stderr)
        return USAGE
    except OSError as error:
        print(f"error: cannot write {path}: {error.strerror}", file=sys.stderr)
        return FAILED
    print(f"wrote {path}; play it with: echo2-scenario run {path} --seed 7")
    return OK
