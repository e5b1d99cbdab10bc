"""``echo2-scenario reproduce faults``: what does a run lose when some of its peers fail?

The demo's task and model, with the real learner and real engines, as processes on this machine:
one run for each share of peers that fail and each seed. To fail means ``kill -9`` of the peer, and
with it of its engine, while the learner is at a step drawn from the middle of the run; nothing is
said, its leases run out. With ``--fate dead`` it stays away; with ``--fate return`` it comes back
on its own disk some seconds later, and fails again and again.

All machines share these cores, so each is given a pace that leaves them idle (`scenarios.paced`):
a step takes `STEP_S` and the whole fleet makes `HEADROOM` times the samples that the learner needs
for it. So the fleet is as much smaller as peers are gone, which is the question, and no peer is
faster because another is dead, which would be this machine's answer. The claim of the paper
(ECHO-2, arXiv:2602.02192): a slight loss only.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import trio

from coordinator.access import JOIN_FILE
from coordinator.recorder import METRICS_FILE
from echo2p2p.errors import ChildError, EchoError
from echo2p2p.net.child import last_words_of
from scenarios import bench_report, pictures
from scenarios.cells import Cells
from scenarios.demo import python_command

SHARES: Final = (0, 10, 30, 50)
"""Percent."""
SEEDS: Final = (1, 2, 3)
PEERS: Final = 10
STEPS: Final = 80
STEP_S: Final = 1.0
PER_STEP: Final = 256
"""Trajectories; as in the demo's preset."""
HEADROOM: Final = 1.5
LEASES_AT_ONCE: Final = 4
WARM_STEPS: Final = 10
"""Left out of throughput and idle time: engines come up meanwhile."""
STRIKES: Final = (0.2, 0.6)
"""Peers fail while the learner is in this part of its steps."""
AWAY_S: Final = (5.0, 15.0)
UP_S: Final = (15.0, 40.0)
"""How long those that return are away, and up, each time."""
FATES: Final = ("dead", "return")
LOOK_S: Final = 0.1
START_LIMIT_S: Final = 180.0
LIMIT_TIMES: Final = 8.0
"""A run that takes so many times what its steps should is given up."""
STOP_S: Final = 10.0


@dataclass(frozen=True)
class Case:
    """One run."""

    share: int
    """Percent of the peers that fail."""
    seed: int
    fate: str
    peers: int = PEERS
    steps: int = STEPS

    @property
    def name(self) -> str:
        """Of its cell."""
        return f"{self.share}-percent-seed-{self.seed}"

    @property
    def sample_s(self) -> float:
        """Pace of one peer."""
        return self.peers * STEP_S / (HEADROOM * PER_STEP)

    def plan(self) -> dict[int, float]:
        """Return at which step each peer that fails does so."""
        rng = random.Random(f"faults {self.seed} {self.share}")  # noqa: S311 - to be repeatable
        who = rng.sample(range(self.peers), round(self.share * self.peers / 100))
        low, high = (part * self.steps for part in STRIKES)
        return {index: rng.uniform(low, high) for index in sorted(who)}


class Run:
    """The processes of one run.

    Args:
        case: What to run.
        folder: Of the run; an earlier try is removed.
    """

    def __init__(self, case: Case, folder: Path) -> None:
        self._case = case
        self._folder = folder
        self._kills = 0
        self._random = random.Random(f"away {case.seed} {case.share}")  # noqa: S311 - as above

    async def measure(self) -> dict[str, Any]:
        """Run it to its end; return its figures.

        Raises:
            EchoError: The coordinator failed, or it takes for ever.
        """
        case = self._case
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        try:
            with trio.fail_after(START_LIMIT_S + LIMIT_TIMES * case.steps * STEP_S):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._peers)
                    await self._coordinate()
                    nursery.cancel_scope.cancel()
        except trio.TooSlowError as error:
            raise EchoError(
                f"{case.name}: it does not end; see the logs in {self._folder}"
            ) from error
        except BaseExceptionGroup as group:
            raise _first(group) from group
        summary = json.loads((self._folder / "summary.json").read_text("utf-8"))
        lines = (self._folder / METRICS_FILE).read_text("utf-8").splitlines()
        found = figures(summary, list(map(json.loads, lines)))
        shutil.rmtree(self._folder)
        return {**found, "failed": sorted(case.plan()), "kills": self._kills}

    async def _coordinate(self) -> None:
        case = self._case
        command = python_command(
            "scenarios.paced",
            *("run", "--pace-step-s", str(STEP_S), "--config", "@demo"),
            *("--run.folder", str(self._folder), "--run.steps", str(case.steps)),
            *("--run.seed", str(case.seed)),
        )
        log = self._folder / "coordinator.log"
        code = await _run(command, log)
        if code:
            tail = last_words_of(log.read_text("utf-8", errors="replace"))
            raise ChildError("coordinator", f"ended with code {code}", log_tail=tail)

    async def _peers(self) -> None:
        while not (self._folder / JOIN_FILE).exists():  # noqa: ASYNC110 others write it
            await trio.sleep(LOOK_S)
        join = json.loads((self._folder / JOIN_FILE).read_text("utf-8"))
        plan = self._case.plan()
        async with trio.open_nursery() as nursery:
            for index in range(self._case.peers):
                nursery.start_soon(self._peer, index, join, plan.get(index))

    async def _peer(self, index: int, join: Mapping[str, str], fails_at: float | None) -> None:
        """Keep a peer up as long as it is to be; never ends with a process that runs."""
        folder = self._folder / "peers" / str(index)
        folder.mkdir(parents=True)
        command = python_command(
            "scenarios.paced",
            *("join", "--pace-sample-s", repr(self._case.sample_s)),
            *("--url", join["url"], "--token", join["token"], "--name", f"peer-{index}"),
            *("--folder", str(folder), "--relay.host", "127.0.0.1"),
            *("--engine.kind", "transformers"),
            *("--engine.leases_at_once", str(LEASES_AT_ONCE)),
        )
        with trio.CancelScope() as life:
            async with trio.open_nursery() as nursery:
                if fails_at is not None:
                    nursery.start_soon(self._fail_at, fails_at, life)
                code = await _run(command, folder / "peer.log")
                nursery.cancel_scope.cancel()
        if not life.cancelled_caught:
            if code:
                raise ChildError(f"peer-{index}", f"ended with code {code}; see {folder}")
            return
        self._kills += 1
        while self._case.fate == "return":
            await trio.sleep(self._random.uniform(*AWAY_S))
            if self._step() >= STRIKES[1] * self._case.steps:
                await _run(command, folder / "peer.log")
                return
            with trio.move_on_after(self._random.uniform(*UP_S)) as again:
                await _run(command, folder / "peer.log")
            if not again.cancelled_caught:
                return
            self._kills += 1

    async def _fail_at(self, step: float, life: trio.CancelScope) -> None:
        while self._step() < step:  # noqa: ASYNC110 another process writes it
            await trio.sleep(LOOK_S)
        life.cancel()

    def _step(self) -> int:
        """Return how many steps are done."""
        with suppress(OSError):
            return (self._folder / METRICS_FILE).read_bytes().count(b"\n")
        return 0


async def _run(command: list[str], log: Path) -> int:
    """Run one process to its end; when cancelled it is killed at once."""
    with log.open("ab") as output:
        process = await trio.lowlevel.open_process(
            command, stdin=subprocess.PIPE, stdout=output, stderr=output
        )
        try:
            return await process.wait()
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGKILL)
                with trio.CancelScope(shield=True), trio.move_on_after(STOP_S):
                    await process.wait()


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def figures(summary: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what one run has come to; throughput and idle time from `WARM_STEPS` on."""
    counted = steps[WARM_STEPS:]
    took_s = sum(step["elapsed_s"] for step in counted)
    counts = summary["trajectories"]
    return {
        "steps_per_s": round(len(counted) / took_s, 4),
        "trajectories_per_s": round(len(counted) * PER_STEP / took_s, 1),
        "idle_share": round(sum(step["idle_s"] for step in counted) / took_s, 4),
        "reward_before": summary["reward_version0"],
        "reward_last": summary["reward_last"],
        "steps": summary["steps"],
        "wall_s": round(summary["wall_s"], 1),
        "issued": counts["issued"],
        "rejected": counts["rejected"],
        "balances": counts["balances"] and counts["recount_agrees"],
    }


def rows_of(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each share: the middle seed, and the lowest and highest."""
    rows = []
    for share in sorted({cell["share"] for cell in cells}):
        mine = [cell for cell in cells if cell["share"] == share]
        row: dict[str, Any] = {"share": share, "seeds": len(mine)}
        for key in ("steps_per_s", "idle_share", "reward_last"):
            values = sorted(cell[key] for cell in mine)
            row[key] = [values[0], statistics.median(values), values[-1]]
        row["failed"] = len(mine[0]["failed"])
        row["kills"] = sum(cell["kills"] for cell in mine)
        rejected = sum(sum(cell["rejected"].values()) for cell in mine)
        row["rejected_share"] = rejected / sum(cell["issued"] for cell in mine)
        rows.append(row)
    for row in rows:
        row["throughput"] = row["steps_per_s"][1] / rows[0]["steps_per_s"][1]
    return rows


def table(result: Mapping[str, Any]) -> str:
    """Return the result for a person."""
    rows, given = result["rows"], result["settings"]
    lines = [
        f"the demo's task, {given['steps']} steps of {PER_STEP} trajectories, a step at least "
        f"{STEP_S:g} s; {given['peers']} peers that make {HEADROOM:g} times what it needs",
        f"who fails is killed (kill -9) between {100 * STRIKES[0]:g} and {100 * STRIKES[1]:g} % of "
        f"the steps and {_fate(given['fate'])}; seeds {', '.join(map(str, given['seeds']))}: "
        "middle (lowest to highest)",
        f"{bench_report.stated()}, torch {result['versions'].get('torch')}",
        f"{'fail':>6}{'peers':>7}{'kills':>7}   {'steps/s':<25}{'of none':>8}   "
        f"{'idle, %':<20}{'reward, last ten':<25}rejected",
    ]
    for row in rows:
        idle = [100 * value for value in row["idle_share"]]
        lines.append(
            f"{row['share']:>4} %{row['failed']:>7}{row['kills']:>7}   "
            f"{_spread(row['steps_per_s'], 3):<25}{100 * row['throughput']:>6.0f} %   "
            f"{_spread(idle, 1):<20}{_spread(row['reward_last'], 3):<25}"
            f"{100 * row['rejected_share']:.1f} %"
        )
    return "\n".join(lines)


def _fate(fate: str) -> str:
    if fate == "dead":
        return "stays away"
    away, up = ("{:g} to {:g} s".format(*span) for span in (AWAY_S, UP_S))
    return f"comes back after {away}, to be killed again after {up}, until then"


def _spread(values: Sequence[float], digits: int) -> str:
    low, middle, high = (f"{value:.{digits}f}" for value in values)
    return f"{middle} ({low} to {high})"


def draw(rows: Sequence[Mapping[str, Any]], settings: Mapping[str, Any], target: Path) -> None:
    """Write a PNG file; matplotlib (extra ``report``) must be there."""
    figure, axes = pictures.new_figure()
    shares = [row["share"] for row in rows]
    none = rows[0]["steps_per_s"][1]
    for label, key, scale in (
        ("steps a second, over those when none fails", "steps_per_s", 1 / none),
        ("reward of the last ten steps", "reward_last", 1.0),
        ("learner idle", "idle_share", 1.0),
    ):
        low, middle, high = ([scale * row[key][at] for row in rows] for at in range(3))
        spread = [
            [m - least for m, least in zip(middle, low, strict=True)],
            [most - m for m, most in zip(middle, high, strict=True)],
        ]
        axes.errorbar(shares, middle, yerr=spread, marker="o", capsize=4, label=label)
    axes.set_xticks(shares)
    axes.set_ylim(0, 1.1)
    axes.set_xlabel("peers that fail, %")
    axes.set_title(f"{HEADROOM:g} times the peers that the learner needs; middle and all seeds")
    axes.grid(visible=True, color="#eeeeee")
    axes.legend(frameon=False)
    pictures.save(
        figure,
        target,
        f"the demo's task, {settings['steps']} steps, {settings['peers']} peers; kill -9, "
        f"{_fate(settings['fate'])}; seeds {', '.join(map(str, settings['seeds']))}",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command understands."""
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("runs/faults"),
        help="where each run's figures are kept; started again it goes on (default: runs/faults)",
    )
    parser.add_argument(
        "--shares", type=_percent, nargs="+", default=list(SHARES), help="of peers that fail, in %%"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), help="default: 1 2 3")
    parser.add_argument("--fate", choices=FATES, default="dead", help="what becomes of them")
    parser.add_argument("--peers", type=_above(1), default=PEERS, help=f"default: {PEERS}")
    parser.add_argument("--steps", type=_above(WARM_STEPS), default=STEPS, help=f"default: {STEPS}")
    parser.add_argument("--plot", type=Path, help="draw all three against the share (PNG)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure what has not been measured yet.

    Raises:
        EchoError: A run failed, or what is in the folder is of another kind.
    """
    pictures.check_target(arguments.plot)
    machine, versions = bench_report.machine(), bench_report.versions("torch", "transformers")
    settings = {
        "peers": arguments.peers,
        "steps": arguments.steps,
        "fate": arguments.fate,
        "step_s": STEP_S,
        "headroom": HEADROOM,
    }
    cases = [
        Case(share, seed, arguments.fate, arguments.peers, arguments.steps)
        for seed in arguments.seeds
        for share in arguments.shares
    ]
    conditions = {**settings, "machine": machine, "versions": versions}
    kept = Cells(arguments.folder, conditions, len(cases))
    cells = []
    for case in cases:
        folder = arguments.folder / "now"
        found = await kept.get(case.name, partial(_measure, case, folder), _line)
        cells.append({"share": case.share, "seed": case.seed, **found})
    rows = rows_of(cells)
    stated = {**settings, "seeds": arguments.seeds}
    if arguments.plot is not None:
        draw(rows, stated, arguments.plot)
    return {
        "settings": stated,
        "rows": rows,
        "cells": cells,
        "machine": machine,
        "versions": versions,
    }


async def _measure(case: Case, folder: Path) -> dict[str, Any]:
    return await Run(case, folder).measure()


def _line(cell: Mapping[str, Any]) -> str:
    return (
        f"{cell['steps_per_s']:.3f} steps/s, idle {100 * cell['idle_share']:.1f} %, reward "
        f"{cell['reward_last']:.3f}, {cell['kills']} kills, {cell['wall_s']:.0f} s"
    )


def _percent(text: str) -> int:
    value = int(text) if text.isdecimal() else -1
    if not 0 <= value <= 90:
        raise argparse.ArgumentTypeError(f"{text!r} is not between 0 and 90")
    return value


def _above(low: int) -> Any:  # noqa: ANN401 - what argparse wants of a type is a function
    def read(text: str) -> int:
        value = int(text) if text.isdecimal() else 0
        if value <= low:
            raise argparse.ArgumentTypeError(f"{text!r} is not above {low}")
        return value

    return read
