"""What a volunteer sees: a line now and then that says what the machine does, and for what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import trio

from peer.figures import PeerFigures, Tally

LINE_S: Final = 10.0
SILENT_S: Final = 5.0
"""A coordinator that has not answered for longer is mentioned."""


def peer_line(figures: PeerFigures) -> str:
    """Return one line: state, version, speed, what became of the work, bytes."""
    version = "-" if figures.version is None else str(figures.version)
    if figures.version is not None and figures.latest_version is not None:
        behind = figures.latest_version - figures.version
        version += f" (-{behind})" if behind > 0 else ""
    parts = [figures.state, f"version {version}"]
    if figures.tokens_generated:
        parts.append(f"{figures.tokens_per_s:.0f} tokens/s")
    parts.append(tally_text(figures.tally))
    if figures.state != "joining" and figures.silent_s > SILENT_S:
        parts.append(f"no answer from the coordinator for {figures.silent_s:.0f} s")
    return "  ".join(parts)


def tally_text(tally: Tally) -> str:
    """Return what became of the work, and the bytes."""
    words = f"{tally.accepted} groups accepted, {tally.trained} trained so far"
    if rejected := sum(tally.rejected.values()):
        ordered = sorted(tally.rejected.items(), key=lambda item: (-item[1], item[0]))
        reasons = ", ".join(f"{reason} {count}" for reason, count in ordered)
        words += f", {rejected} rejected ({reasons})"
    relayed, received = tally.relayed_bytes / 1e6, tally.received_bytes / 1e6
    return f"{words}; {relayed:.1f} MB relayed, {received:.1f} MB received"


async def show_figures(figures: Callable[[], PeerFigures], say: Callable[[str], None]) -> None:
    """Say a line every `LINE_S`, if it is another one; runs until cancelled."""
    said = ""
    while True:
        await trio.sleep(LINE_S)
        line = peer_line(figures())
        if line != said:
            say(line)
            said = line
