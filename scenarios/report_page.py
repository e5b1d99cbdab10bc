"""``echo2-scenario run STORY --report FILE``: one HTML page of a played story, for a person.

The page is whole in itself: its pictures are drawn here as SVG, with no script, font or file from
elsewhere, so that it can be mailed, kept, and opened offline. It is made of what `--json` prints
and of what `--trace` writes, virtual or live.
"""

from __future__ import annotations

import html
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from scenarios.watch import EVENT_CHECKERS, LOOKS
from scenarios.world import COORDINATOR

Entry = Mapping[str, Any]
"""A line of a trace: ``t`` in seconds, ``event``, ``node`` perhaps, and the event's fields."""

WIDTH: Final = 960
LEFT: Final = 110
RIGHT: Final = 20
ROW: Final = 16
SOONEST_S: Final = 0.01
"""Where the scale of waits begins."""
ROWS_MAX: Final = 80
"""Machines that are drawn one by one; of more, the first."""
COLOURS: Final = {
    "trained": "#2a7f4f",
    "queued": "#8fbf9f",
    "in_flight": "#c9d8ce",
    "rejected": "#c0504d",
}
FIRST, HALF, LAST = "#9bb8d3", "#4f81bd", "#1f3f66"
FAULT, ALIVE, PROVED = "#e07b39", "#dfe7ee", "#1f5fae"

STYLE: Final = """
body { font: 14px/1.45 system-ui, sans-serif; color: #222; margin: 2rem auto; max-width: 980px; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .3rem; }
p { margin: .3rem 0; color: #555; } svg { display: block; } text { font-size: 11px; fill: #555; }
table { border-collapse: collapse; } td, th { padding: .15rem .8rem .15rem 0; text-align: left; }
td.n { text-align: right; font-variant-numeric: tabular-nums; } .held { color: #2a7f4f; }
.broken { color: #b3261e; font-weight: 600; } code { background: #f3f3f3; padding: 0 .3em; }
.key { display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 1em; }
"""


@dataclass(frozen=True)
class Axis:
    """From seconds to the page, and back in words."""

    end_s: float

    def x(self, at_s: float) -> float:
        """Return where a moment is drawn."""
        share = min(1.0, max(0.0, at_s / self.end_s))
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

    def ticks(self, height: float) -> str:
        """Return the time's scale under a picture of this height."""
        step = next(s for s in (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1e9) if self.end_s / s < 12)
        lines = []
        at_s = 0.0
        while at_s <= self.end_s:
            x = self.x(at_s)
            lines.append(f'<line x1="{x}" x2="{x}" y1="0" y2="{height}" stroke="#eee"/>')
            lines.append(f'<text x="{x}" y="{height + 14}" text-anchor="middle">{at_s:g} s</text>')
            at_s += step
        return "".join(lines)


def page(
    result: Mapping[str, Any],
    entries: Sequence[Entry],
    machine: Mapping[str, object],
    versions: Mapping[str, object],
) -> str:
    """Return the page of one run.

    Args:
        result: As ``--json`` prints it.
        entries: As ``--trace`` writes them, in order.
        machine: On which it was played.
        versions: Of what.
    """
    axis = Axis(max(1.0, float(result["virtual_s"])))
    name = f"{result['story']}, seed {result['seed']}"
    parts = [
        _head(result),
        _section(
            "Versions reach the engines",
            "When a version was published, and how long until the first, half, and the last of the "
            "engines that took exactly this one had proved it.",
            _versions(entries, axis),
            {"first": FIRST, "half": HALF, "last": LAST},
        ),
        _section(
            "Machines",
            "Membership, faults, and each version that an engine proved.",
            _machines(entries, axis),
            {"member": ALIVE, "fault": FAULT, "version": PROVED},
        ),
        _section(
            "Steps",
            "Each step of the learner, as high as the age of the oldest rollout in its batch.",
            _steps(entries, axis),
            {},
        ),
        _section("Trajectories", *_fates(result)),
        _section("Bytes", "Sent and received, repetitions included.", _bytes(result), {}),
        _section(
            "Checkers", "Always on; what a broken one has found stands at the top.", _checkers()
        ),
        _section("Made with", "", _table([*_flat(machine), *_flat(versions)])),
    ]
    title = html.escape(name)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def _flat(figures: Mapping[str, object]) -> list[tuple[str, object]]:
    return list(figures.items())


def _checkers() -> str:
    return _table([(name,) for name in (*EVENT_CHECKERS, *LOOKS)])


def _section(title: str, about: str, body: str, keys: Mapping[str, str] | None = None) -> str:
    marks = "".join(
        f'<span class="key" style="background:{colour}"></span>{html.escape(what)}'
        for what, colour in (keys or {}).items()
    )
    return f"<h2>{html.escape(title)}</h2><p>{html.escape(about)}{marks}</p>{body}"


def _head(result: Mapping[str, Any]) -> str:
    idle = result["idle_share"]
    rows = {
        "peers": result["peers"],
        "seconds": f"{result['virtual_s']:.1f}",
        "steps": result["steps"],
        "learner idle": "" if idle is None else f"{100 * idle:.1f} %",
        "versions": result["versions"]["published"],
        "strikes": ", ".join(f"{k}: {v}" for k, v in result["strikes"].items()) or "none",
        "converged at": "" if result["converged_s"] is None else f"{result['converged_s']:.1f} s",
    }
    if result["held"]:
        verdict = '<p class="held">Every checker held.</p>'
    else:
        problems = "".join(f"<li>{html.escape(one)}</li>" for one in result["problems"])
        verdict = f'<ul class="broken">{problems}</ul>'
    cells = "".join(f"<tr><th>{k}</th><td>{html.escape(str(v))}</td></tr>" for k, v in rows.items())
    again = html.escape(result["replay"])
    return (
        f"<h1>{html.escape(result['story'])}, seed {result['seed']}</h1>{verdict}"
        f"<table>{cells}</table><p>Again: <code>{again}</code></p>"
    )


def _svg(height: float, body: str) -> str:
    return f'<svg width="{WIDTH}" height="{height + 22:g}" role="img">{body}</svg>'


def _label(text: str, y: float) -> str:
    return f'<text x="{LEFT - 8}" y="{y:g}" text-anchor="end">{html.escape(text)}</text>'


def _versions(entries: Iterable[Entry], axis: Axis) -> str:
    published: dict[object, float] = {}
    waits: dict[object, list[float]] = defaultdict(list)
    for entry in entries:
        version = entry.get("version")
        if entry["event"] == "version.published":
            published[version] = entry["t"]
        elif entry["event"] == "version.loaded" and version in published:
            waits[version].append(entry["t"] - published[version])
    height = 160.0
    slowest_s = max((max(each) for each in waits.values()), default=1.0)
    decades = max(1, math.ceil(math.log10(max(slowest_s, SOONEST_S) / SOONEST_S)))
    dots = []
    for decade in range(decades + 1):
        y = height - decade / decades * (height - 8)
        dots.append(_label(f"{SOONEST_S * 10**decade:g} s", y + 4))
        dots.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" stroke="#eee"/>')
    for version, each in waits.items():
        order, x = sorted(each), axis.x(published[version])
        for wait_s, colour in (
            (order[0], FIRST),
            (order[len(order) // 2], HALF),
            (order[-1], LAST),
        ):
            share = math.log10(max(wait_s, SOONEST_S) / SOONEST_S) / decades
            y = round(height - share * (height - 8), 1)
            title = f"<title>version {version}: {wait_s:.3f} s</title>"
            dots.append(f'<circle cx="{x}" cy="{y}" r="2.5" fill="{colour}">{title}</circle>')
    return _svg(height, axis.ticks(height) + "".join(dots))


def _machines(entries: Sequence[Entry], axis: Axis) -> str:
    named = dict.fromkeys(
        str(e["node"]) for e in entries if e.get("node") and e["event"] != "nemesis.healed"
    )
    names = [COORDINATOR, *sorted((n for n in named if n != COORDINATOR), key=_natural)]
    shown = names[:ROWS_MAX]
    rows = {name: [_label(name, i * ROW + 12)] for i, name in enumerate(shown)}
    mine = [e for e in entries if e.get("node") != COORDINATOR]
    for begins, of in (("peer.joined", mine), ("run.opened", entries)):
        for name, begin_s, end_s in _spans(of, begins, _GONE, axis.end_s):
            _bar(rows, shown, axis, name, begin_s, end_s, ALIVE, "member")
    for name, begin_s, end_s in _spans(entries, "nemesis.strikes", {"nemesis.ends"}, axis.end_s):
        _bar(rows, shown, axis, name, begin_s, end_s, FAULT, _fault_at(entries, name, begin_s))
    for entry in entries:
        name = str(entry.get("node"))
        if entry["event"] == "version.loaded" and name in rows:
            x, top = axis.x(entry["t"]), shown.index(name) * ROW
            title = f"<title>version {entry['version']}</title>"
            line = f'<line x1="{x}" x2="{x}" y1="{top + 5}" y2="{top + 13}" stroke="{PROVED}">'
            rows[name].append(f"{line}{title}</line>")
    height = len(shown) * ROW
    more = f"<p>and {len(names) - len(shown)} more</p>" if len(names) > len(shown) else ""
    return _svg(height, axis.ticks(height) + "".join(map("".join, rows.values()))) + more


_GONE: Final = {"run.ended", "nemesis.crash", "membership.lost"}


def _natural(name: str) -> tuple[str, int]:
    stem, _, number = name.rpartition("-")
    return (stem, int(number)) if number.isdecimal() else (name, 0)


def _spans(
    entries: Iterable[Entry], begins: str, ends: set[str], end_s: float
) -> list[tuple[str, float, float]]:
    """Return the node, begin and end of what one event begins and others end, at the same node."""
    found: list[tuple[str, float, float]] = []
    under_way: dict[str, float] = {}
    for entry in entries:
        name = str(entry.get("node"))
        if entry["event"] == begins:
            under_way.setdefault(name, entry["t"])
        elif entry["event"] in ends and name in under_way:
            found.append((name, under_way.pop(name), entry["t"]))
    return [*found, *((name, begin_s, end_s) for name, begin_s in under_way.items())]


def _fault_at(entries: Iterable[Entry], name: str, at_s: float) -> str:
    return next(
        str(e["fault"])
        for e in entries
        if e["event"] == "nemesis.strikes" and e.get("node") == name and e["t"] == at_s
    )


def _bar(
    rows: Mapping[str, list[str]],
    shown: Sequence[str],
    axis: Axis,
    name: str,
    begin_s: float,
    end_s: float,
    colour: str,
    what: str,
) -> None:
    if name not in rows:
        return
    x, top = axis.x(begin_s), shown.index(name) * ROW + 3
    width = max(2.0, round(axis.x(end_s) - x, 1))
    title = f"<title>{html.escape(what)}, {begin_s:.1f} to {end_s:.1f} s</title>"
    box = f'x="{x}" y="{top}" width="{width}" height="{ROW - 4}" fill="{colour}"'
    rows[name].append(f"<rect {box}>{title}</rect>")


def _steps(entries: Iterable[Entry], axis: Axis) -> str:
    done = [e for e in entries if e["event"] == "step.done"]
    height = 80.0
    oldest = max((int(e["age_max"]) for e in done), default=0)
    lines = [_label(f"age {oldest}", 12), _label("age 0", height - 4)]
    for entry in done:
        x = axis.x(entry["t"])
        y = round(height - 6 - (height - 16) * int(entry["age_max"]) / max(1, oldest), 1)
        title = f"<title>step {entry['step']}, age {entry['age_max']}</title>"
        line = f'<line x1="{x}" x2="{x}" y1="{height}" y2="{y}" stroke="{HALF}">{title}</line>'
        lines.append(line)
    return _svg(height, axis.ticks(height) + "".join(lines))


def _fates(result: Mapping[str, Any]) -> tuple[str, str, Mapping[str, str]]:
    counts = result["trajectories"]
    if counts is None:
        return "The coordinator has left no summary.", "", {}
    rejected = counts["rejected"]
    shares = {**{k: counts[k] for k in ("trained", "queued", "in_flight")}}
    shares["rejected"] = sum(rejected.values())
    x, boxes = float(LEFT), []
    for fate, count in shares.items():
        width = round(count / max(1, counts["issued"]) * (WIDTH - LEFT - RIGHT), 1)
        box = f'x="{x}" y="2" width="{width}" height="22" fill="{COLOURS[fate]}"'
        boxes.append(f"<rect {box}><title>{fate}: {count}</title></rect>")
        x += width
    rows = [(fate.replace("_", " "), count) for fate, count in shares.items()]
    rows += [(f"rejected: {reason}", count) for reason, count in rejected.items()]
    about = f"{counts['issued']} issued, each at one place in the end."
    keys = {fate.replace("_", " "): colour for fate, colour in COLOURS.items()}
    return about, _svg(26, "".join(boxes)) + _table(rows), keys


def _bytes(result: Mapping[str, Any]) -> str:
    rows = [
        (name, f"{line['sent'] / 1e6:.2f} MB sent", f"{line['received'] / 1e6:.2f} MB received")
        for name, line in result["bytes"].items()
    ]
    peers = [line for name, line in result["bytes"].items() if name != COORDINATOR]
    sent = sum(line["sent"] for line in peers) / 1e6
    received = sum(line["received"] for line in peers) / 1e6
    rows[1:1] = [("all peers", f"{sent:.2f} MB sent", f"{received:.2f} MB received")]
    return _table(rows[: ROWS_MAX + 2])


def _table(rows: Iterable[Sequence[object]]) -> str:
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{' class=n' if place else ''}>{html.escape(str(cell))}</td>"
            for place, cell in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    return f"<table>{body}</table>"
