"""``echo2-scenario agree``: a story in virtual time and with real processes, figure beside figure.

Virtual time is worth something if what it says comes true. Each story is played on both backends
from the same seed, so with the same machines, lines, faults and victims, and each figure of the one
must be near that of the other: they may differ by a share of the larger one, or by so much that
nobody would care (`TOLERANCES`). In virtual time work costs here what it costs on the machine that
plays the live story (`scenarios.costs`), because that machine plays all of them on a few cores; so
that is measured first (`scenarios.bench_costs`).

The tolerances say what a reader may rely on. Where a figure is outside, the model is to be mended,
not the tolerance. A fault meets a process in the middle of something: when in its second a retry
falls due is chance, and two live runs of one seed differ as well. So means over several seeds say
more (``--seeds``). A live run on a machine that is busy with other things says so, and proves
nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import msgspec
import trio

from echo2p2p.errors import ConfigError
from scenarios import bench_costs, bench_report
from scenarios.arguments import whole
from scenarios.compare import figures
from scenarios.costs import Costs
from scenarios.live_lab import check_possible, play_live
from scenarios.play import play
from scenarios.story import load_story

STORIES: Final = ("steady", "slow-uplink", "kills", "lies", "partition", "restart")
"""In the folder ``live``: a minute each, few peers."""
SEEDS_MAX: Final = 100
BUSY_CORES: Final = 0.2
"""More than this of the cores, on average, must not be others'."""


@dataclass(frozen=True)
class Tolerance:
    """How far two figures may be from each other: the larger of the two counts."""

    share: float
    """Of the larger figure."""
    least: float
    """In the figure's own unit."""

    def holds(self, a: float, b: float) -> bool:
        """Return whether they are near enough."""
        return abs(a - b) <= max(self.least, self.share * max(abs(a), abs(b)))


TOLERANCES: Final[Mapping[str, Tolerance]] = {
    "in half of the engines, s": Tolerance(0.25, 0.05),
    "in 95 % of the engines, s": Tolerance(0.35, 0.25),
    "in all engines, middle version, s": Tolerance(0.25, 0.1),
    "idle share": Tolerance(0.0, 0.05),
    "steps": Tolerance(0.1, 3),
    "versions": Tolerance(0.1, 3),
    "trained share": Tolerance(0.0, 0.05),
    "rejected share": Tolerance(0.0, 0.05),
    "coordinator sent, MB": Tolerance(0.15, 0.2),
    "peers sent, MB": Tolerance(0.15, 0.2),
}
"""By the names of `scenarios.compare`, each of many events. What is left out is shown only: above
all the slowest engine ever, one peer with one version, which says how a fault fell."""
REASON: Final = "rejected("
EACH_REASON: Final = Tolerance(0.0, 0.05)
"""Of trajectories that were rejected for one reason, as a share of those issued."""


def tolerance_of(name: str) -> Tolerance | None:
    """Return what a figure may differ by; ``None``: it is shown only."""
    return EACH_REASON if name.startswith(REASON) else TOLERANCES.get(name)


def mean_figures(results: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Return the mean of each figure over the seeds; ``None`` where one seed has none."""
    each = [figures(result) for result in results]
    names = dict.fromkeys(name for one in each for name in one)
    means: dict[str, float | None] = {}
    for name in names:
        missing = 0.0 if name.startswith(REASON) else None  # a reason that never came up
        found = [one.get(name, missing) for one in each]
        known = [value for value in found if value is not None]
        means[name] = fmean(known) if len(known) == len(found) else None
    return means


def rows_of(
    virtual: Sequence[Mapping[str, Any]], live: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return each figure of both backends, and whether they agree: results, one for each seed."""
    left, right = mean_figures(virtual), mean_figures(live)
    rows = []
    for name in [*left, *(name for name in right if name not in left)]:
        tolerance = tolerance_of(name)
        a, b = left.get(name), right.get(name)
        if name.startswith(REASON):
            a, b = a or 0.0, b or 0.0
        agrees = None
        if tolerance is not None:
            agrees = a is not None and b is not None and tolerance.holds(a, b)
        rows.append({"figure": name, "virtual": a, "live": b, "agrees": agrees})
    return rows


async def compare_backends(name: str, seeds: Sequence[int], costs: Costs) -> dict[str, Any]:
    """Play one story twice for each seed; return its figures.

    Args:
        name: Of the story.
        seeds: Of everything random.
        costs: Of work on this machine.

    Raises:
        EchoError: It cannot be played live.
    """
    story = load_story(name)
    virtual, live = [], []
    for seed in seeds:
        played = await trio.to_thread.run_sync(partial(play, name, story, seed, costs=costs))
        virtual.append(played.result())
        live.append((await play_live(name, story, seed))[0])
    rows = rows_of(virtual, live)
    held = all(result["held"] for result in virtual + live)
    loads = [result["load"] for result in live]
    return {
        "story": name,
        "seeds": list(seeds),
        "rows": rows,
        "problems": {
            backend: [problem for result in results for problem in result["problems"]]
            for backend, results in (("virtual", virtual), ("live", live))
        },
        "load": max(loads, key=lambda load: load["others_cores"]),
        "agrees": held and all(row["agrees"] is not False for row in rows),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command understands."""
    known = [f"live/{name}" for name in STORIES]
    parser.add_argument(
        "stories", nargs="*", default=known, help=f"which (default: {', '.join(known)})"
    )
    parser.add_argument("--seed", type=int, default=7, help="of everything random (default: 7)")
    parser.add_argument(
        "--seeds",
        type=whole(1, SEEDS_MAX),
        default=1,
        help="so many from that one on; means are compared (default: 1)",
    )
    parser.add_argument(
        "--costs",
        type=Path,
        help="what work costs on this machine, as `bench costs --json` has written it (default: "
        "measured first, a minute or two)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Play all stories; tell of each on standard error when it is over.

    Raises:
        EchoError: There is no root, a story is not one, or the costs are none.
    """
    for name in arguments.stories:
        load_story(name)
    check_possible()
    if arguments.costs is None:
        print("measuring what work costs on this machine", file=sys.stderr, flush=True)
        costs = bench_costs.costs_of(await bench_costs.measure())
    else:
        costs = read_costs(arguments.costs)
    seeds = range(arguments.seed, arguments.seed + arguments.seeds)
    stories = []
    for name in arguments.stories:
        one = await compare_backends(name, seeds, costs)
        word = "agree" if one["agrees"] else "DIFFER"
        print(f"{name}: the backends {word}", file=sys.stderr, flush=True)
        stories.append(one)
    return {
        "agree": all(one["agrees"] for one in stories),
        "stories": stories,
        "tolerances": {name: asdict(one) for name, one in TOLERANCES.items()}
        | {"rejected(…) share": asdict(EACH_REASON)},
        "costs": asdict(costs),
        "machine": bench_report.machine(),
        "versions": bench_report.versions(),
    }


def read_costs(path: Path) -> Costs:
    """Return what ``bench costs --json`` has written.

    Raises:
        ConfigError: The file cannot be read, or is something else.
    """
    try:
        return bench_costs.costs_of(msgspec.json.decode(path.read_bytes()))
    except OSError as error:
        raise ConfigError("--costs", f"cannot read {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        detail = f"{path} is none of `echo2-scenario bench costs --json` ({error}): write it anew"
        raise ConfigError("--costs", detail) from error


def table(result: Mapping[str, Any]) -> str:
    """Return the result for a person."""
    lines = [
        bench_report.stated(),
        f"virtual time with what work costs on {result['costs']['cores']} cores; allowed: a share "
        "of the larger figure, or an amount, whichever is more",
    ]
    for story in result["stories"]:
        lines += ["", *_story(story)]
    return "\n".join(lines)


def _story(story: Mapping[str, Any]) -> list[str]:
    load = story["load"]
    lines = [
        f"{story['story']}, {_seeds(story['seeds'])}: {'agree' if story['agrees'] else 'DIFFER'}",
        f"  {'':<34}{'virtual':>10}{'live':>10}   allowed",
    ]
    for row in story["rows"]:
        allowed = tolerance_of(row["figure"])
        words = "" if allowed is None else _allowed(allowed)
        wrong = "  OUTSIDE" if row["agrees"] is False else ""
        cells = "".join(f"{_cell(row[key]):>10}" for key in ("virtual", "live"))
        lines.append(f"  {row['figure']:<34}{cells}   {words}{wrong}".rstrip())
    for backend, problems in story["problems"].items():
        lines += [f"  BROKEN  {backend}: {problem}" for problem in problems]
    if load["others_cores"] > BUSY_CORES:
        lines.append(
            f"  others had {load['others_cores']:.1f} of {load['cores']} cores meanwhile: play it "
            "again on an idle machine, this proves nothing"
        )
    return lines


def _seeds(seeds: Sequence[int]) -> str:
    if len(seeds) == 1:
        return f"seed {seeds[0]}"
    return f"means of the seeds {seeds[0]} to {seeds[-1]}"


def _allowed(tolerance: Tolerance) -> str:
    share = f"{100 * tolerance.share:g} %" if tolerance.share else ""
    return " or ".join(filter(None, (share, f"{tolerance.least:g}")))


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
