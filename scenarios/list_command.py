"""``echo2-scenario list``: the stories, a line each."""

from __future__ import annotations

import argparse
from typing import Final

from echo2p2p.net.program import OK
from scenarios import swarm
from scenarios.story import shipped, shipped_apart

DEMO: Final = "demo"
ABOUT_DEMO: Final = "one coordinator and three peers as processes; trains a tiny model"
ABOUT_SWARM: Final = "everything drawn from the seed: machines, settings, faults"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command understands: nothing."""
    del parser


def main(arguments: argparse.Namespace) -> int:
    """Print one line a story."""
    del arguments
    about = {name: story.about for name, story in {**shipped(), **shipped_apart()}.items()}
    for name, text in {DEMO: ABOUT_DEMO, **about, swarm.NAME: ABOUT_SWARM}.items():
        print(f"{name:<22} {text}")
    return OK
