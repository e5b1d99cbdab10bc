"""The picture of `echo2-scenario bench broadcast`: time to the last peer against their number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scenarios import pictures


def draw(rows: Sequence[Mapping[str, Any]], target: Path) -> None:
    """Write a PNG file; matplotlib (extra ``report``) must be there."""
    figure, axes = pictures.new_figure()
    systems = dict.fromkeys((row["system"], row["settings"]) for row in rows)
    for system, settings in systems:
        mine = [row for row in rows if (row["system"], row["settings"]) == (system, settings)]
        axes.plot(
            [row["peers"] for row in mine],
            [row["last_s"] for row in mine],
            marker="o",
            linewidth=2.5 if system == "echo2p2p" else 1.2,
            label=f"{system} {settings}".rstrip(),
        )
    bounds = {row["peers"]: row["bound_s"] for row in rows}
    peers = sorted(bounds)
    axes.plot(peers, [bounds[n] for n in peers], color="black", linestyle="--", label="bound")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(peers, labels=[str(n) for n in peers])
    axes.set_xlabel("peers")
    axes.set_ylabel("seconds until the last peer has it")
    first = rows[0]
    axes.set_title(f"{first['payload_bytes'] / 1e6:g} MB, {first['links']} links")
    axes.legend(frameon=False)
    axes.grid(visible=True, color="#eeeeee")
    how = f"{first['network']}{', TLS' if first['tls'] else ''}; seed {first['seed']}"
    pictures.save(figure, target, how)
