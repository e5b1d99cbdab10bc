"""A status for eyes: plain lines for a log or a pipe, a drawn view for a terminal.

Both show one mapping, `coordinator.board.Board.status` (or what ``/status`` answered), and compute
nothing but layout. `rich` is imported when a view is drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.table import Table

Status = Mapping[str, Any]

PEERS_SHOWN: Final = 12
"""Rows of the peers' table in a drawn view; the busiest ones."""
CHART_ROWS: Final = 4
_EIGHTHS: Final = " ▁▂▃▄▅▆▇█"
_STYLES: Final = {"active": "green", "idle": "cyan", "warming": "yellow", "joining": "yellow"}


# --- words --------------------------------------------------------------------------------------


def bytes_text(count: float) -> str:
    """Return a number of bytes in three digits."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 99.95 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def duration_text(seconds: float) -> str:
    """Return a duration, as 0:07, 12:34 or 3:04:05."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def reasons_text(counts: Mapping[str, int]) -> str:
    """Return rejections by reason, the commonest first."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{reason} {count}" for reason, count in ordered)


def ledger_text(ledger: Mapping[str, Any]) -> str:
    """Return the equation that must hold, and whether it does."""
    rejected = sum(ledger["rejected"].values())
    reasons = f" ({reasons_text(ledger['rejected'])})" if rejected else ""
    holds = ledger["balances"] and ledger["recount_agrees"]
    return (
        f"{ledger['issued']} issued = {ledger['trained']} trained + {ledger['queued']} queued + "
        f"{ledger['in_flight']} in flight + {rejected} rejected{reasons}; "
        f"{'balances' if holds else 'DOES NOT BALANCE'}"
    )


def phase_text(status: Status) -> str:
    """Return what the run does now."""
    phase = status["phase"]
    if status["outcome"] != "running":
        return str(status["outcome"])
    if phase["name"] == "warm_start":
        return f"warm start, step {phase['step']:.0f}, loss {phase['loss']:.3f}"
    return "training" if phase["name"] == "training" else f"learner: {phase['name']}"


def _number(value: float | None, pattern: str = "{:.3f}") -> str:
    return "-" if value is None else pattern.format(value)


def _figures(status: Status) -> Iterable[tuple[str, str]]:
    """Yield name and text of what is shown in words."""
    first, recent = status["reward_version0"], status["reward_recent"]
    yield "reward", f"{_number(first)} before, {_number(recent)} now"
    ages, budget = status["age_steps"], status["staleness_budget"]
    yield (
        "age",
        f"{_number(status['age_recent'], '{:.2f}')} steps now, {_number(ages['mean'], '{:.2f}')} "
        f"in the mean, {ages['max']} at most (budget {budget})",
    )
    queue = status["queue"]
    yield (
        "queue",
        (
            f"{queue['groups']} groups of {status['batch_groups']} a step, "
            f"{queue['unscored']} waiting for scores"
        ),
    )
    yield (
        "learner",
        (
            f"idle {100 * status['learner_idle_share']:.0f} % of the time, "
            f"{_number(status['steps_per_s'], '{:.2f}')} steps/s"
        ),
    )
    weights = status["weights"]
    sent = f"source sent {bytes_text(weights['source_bytes'])}"
    if weights["ratio_mean"]:
        sent = (
            f"a delta is {bytes_text(weights['delta_bytes_mean'])}, 1/{weights['ratio_mean']:.1f} "
            f"of the model; {sent}"
        )
    yield "weights", f"{sent}, peers {bytes_text(weights['peer_bytes'])}"
    newest = [row for row in status["versions"] if row["last_after_s"] is not None][-10:]
    if newest:
        yield (
            "versions",
            (
                f"{status['versions_published']} published; the last peer has one "
                f"{fmean(row['last_after_s'] for row in newest):.2f} s after its publication"
            ),
        )
    yield "ledger", ledger_text(status["trajectories"])


_COLUMNS: Final = (
    *("peer", "state", "version", "tokens/s", "accepted", "rejected", "up", "down"),
    "why rejected",
)


def _peer_cells(peer: Mapping[str, Any]) -> tuple[str, ...]:
    behind = peer.get("behind")
    version = _number(peer["version"], "{}") + (f" (-{behind})" if behind else "")
    return (
        peer["name"],
        peer["state"],
        version,
        _number(peer.get("tokens_per_s"), "{:.0f}"),
        str(peer["accepted"]),
        str(peer["rejected"]),
        bytes_text(peer["relayed_bytes"]),
        bytes_text(peer["received_bytes"]) if "received_bytes" in peer else "-",
        reasons_text(peer["rejected_by_reason"]),
    )


def _by_work(peers: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return peers: those alive first, then by what was accepted of them."""
    return sorted(peers, key=lambda p: (p["state"] == "gone", -p["accepted"], p["name"]))


# --- plain --------------------------------------------------------------------------------------


def status_lines(status: Status) -> list[str]:
    """Return a status as lines of text."""
    lines = [
        f"run {status['run']}: {phase_text(status)}, step {status['step']}/"
        f"{status['steps_target']}, {duration_text(status['wall_s'])}, generation "
        f"{status['generation']}",
        *(f"{name:<9}{text}" for name, text in _figures(status)),
        "",
    ]
    rows = [_COLUMNS, *(_peer_cells(peer) for peer in _by_work(status["peers"]))]
    widths = [max(len(row[at]) for row in rows) for at in range(len(_COLUMNS))]
    for row in rows:
        cells = [
            cell.rjust(width) if 2 <= at < len(row) - 1 else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


# --- drawn --------------------------------------------------------------------------------------


def bars(values: Sequence[float], width: int, rows: int) -> list[str]:
    """Return a chart of ``values`` as ``rows`` lines of ``width`` columns at most.

    The scale goes from 0 (or the least, if that is below) to the largest. Neighbouring values
    share a column when there are more than columns.
    """
    if not values:
        return [""] * rows
    share = max(1, -(-len(values) // width))
    columns = [fmean(values[at : at + share]) for at in range(0, len(values), share)]
    low = min(0.0, *columns)
    scale = rows * 8 / max(1e-9, max(columns) - low)
    heights = [round((value - low) * scale) for value in columns]
    return [
        "".join(_EIGHTHS[min(8, max(0, height - 8 * row))] for height in heights)
        for row in reversed(range(rows))
    ]


class RunView:
    """A run on a terminal, as a `rich` renderable.

    Args:
        status: See `coordinator.board`.
        title: First words.
        notes: Last lines.
    """

    def __init__(self, status: Status, title: str, notes: Sequence[str] = ()) -> None:
        self._status = status
        self._title = title
        self._notes = notes

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw; see `rich`'s protocol."""
        from rich.padding import Padding
        from rich.text import Text

        del console
        status = self._status
        head = Text.assemble(
            (self._title, "bold"),
            f"  run {status['run']}  ",
            (phase_text(status), "red" if status["outcome"] == "failed" else "green"),
            f"  {duration_text(status['wall_s'])}",
        )
        yield head
        yield self._progress(options.max_width)
        yield from self._chart(options.max_width)
        yield Padding(_figures_table(status), (1, 0, 1, 0))
        yield _peers_table(status)
        for note in self._notes:
            yield Text(note, style="dim", overflow="ellipsis", no_wrap=True)

    def _progress(self, width: int) -> RenderableType:
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        step, target = self._status["step"], self._status["steps_target"]
        row = Table.grid(padding=(0, 2, 0, 0))
        bar = ProgressBar(total=target, completed=step, width=max(10, min(60, width - 20)))
        row.add_row("step", bar, f"{step}/{target}")
        return row

    def _chart(self, width: int) -> RenderResult:
        from rich.text import Text

        rewards = self._status["curve"]["reward"]
        if len(rewards) < 2:
            return
        chart = bars(rewards, max(10, min(80, width - 16)), CHART_ROWS)
        top = max(rewards)
        labels = [f"{top:.2f}", *[""] * (CHART_ROWS - 2), "0.00"]
        for at, (label, row) in enumerate(zip(labels, chart, strict=True)):
            name = "reward" if at == 0 else ""
            yield Text.assemble(f"{name:<7}", (f"{label:>5} ", "dim"), (row, "cyan"))


def _figures_table(status: Status) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column()
    for name, text in _figures(status):
        broken = name == "ledger" and "NOT" in text
        table.add_row(name, Text(text, style="bold red" if broken else ""))
    return table


def _peers_table(status: Status) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="dim")
    for at, column in enumerate(_COLUMNS):
        right = 2 <= at < len(_COLUMNS) - 1
        table.add_column(column, justify="right" if right else "left", no_wrap=True)
    peers = _by_work(status["peers"])
    for peer in peers[:PEERS_SHOWN]:
        cells = [Text(cell) for cell in _peer_cells(peer)]
        cells[1].stylize(_STYLES.get(peer["state"], "dim"))
        table.add_row(*cells)
    if len(peers) > PEERS_SHOWN:
        table.add_row(f"and {len(peers) - PEERS_SHOWN} more")
    return table
