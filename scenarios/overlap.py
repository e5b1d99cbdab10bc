"""``echo2-scenario reproduce overlap``: is the broadcast hidden, and which rule foresees it?

For each staleness budget S and several times of broadcast B, a run is played in virtual time, and
the share of time that its learner idled is laid beside two rules (DESIGN.md §6), given what the run
itself has measured: T seconds a step, R trajectories a step, kappa steps a publication, G seconds a
generation, mu trajectories a second of the whole fleet.

- The paper's overlap rule, as inferred (ECHO-2, arXiv:2602.02192): kappa R / mu + B <= kappa T.
- Ours: (S - kappa + 1) T > B + G, and then mu >= max(R / T, j R / ((S - kappa + j) T - B - G)) for
  each j from 1 to kappa.

A rule is right if it calls feasible exactly the runs that idled at most `IDLE_FREE`. B is set by
the source's uplink from the first step on, and measured: the median over versions of the time until
the last peer has it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import trio

from coordinator.config import Settings
from echo2p2p.errors import EchoError
from echo2p2p.testing.clock import run_virtual
from scenarios import bench_report, pictures
from scenarios.fake_engine import Lengths
from scenarios.story import TASK
from scenarios.world import COORDINATOR, PeerSpec, World, WorldSpec

BUDGETS: Final = (0, 1, 3, 6)
BROADCASTS_S: Final = (0.5, 2.0, 5.0, 10.0)
STEP_S: Final = 2.0
GROUPS: Final = 8
SAMPLES: Final = 4
TOKENS: Final = 20
SECONDS_PER_TOKEN: Final = 0.1
"""So that G is two seconds."""
PEERS: Final = 9
LEASES_AT_ONCE: Final = 2
STEPS: Final = 40
BALLAST: Final = 1_000_000
CHANGED_SHARE: Final = 0.1
"""So that a version is long beside what else the source sends."""
FAST_BYTES_PER_S: Final = 2.5e7
ASSUMED: Final = (
    f"virtual time, {PEERS} equal peers, every answer {TOKENS} tokens long, nothing fails, the "
    "source's uplink makes B"
)
IDLE_FREE: Final = 0.03
"""As in DESIGN.md §6."""


@dataclass(frozen=True)
class Run:
    """What one run has measured."""

    staleness_budget: int
    kappa: int
    broadcast_s: float
    generation_s: float
    fleet_per_s: float
    idle_share: float
    delta_bytes: float


def paper_feasible(run: Run, *, step_s: float = STEP_S, per_step: int = GROUPS * SAMPLES) -> bool:
    """Return what the paper's rule says."""
    kappa = run.kappa
    return kappa * per_step / run.fleet_per_s + run.broadcast_s <= kappa * step_s


def ours_feasible(run: Run, *, step_s: float = STEP_S, per_step: int = GROUPS * SAMPLES) -> bool:
    """Return what our rule says."""
    slack_s = run.broadcast_s + run.generation_s
    budget, kappa = run.staleness_budget, run.kappa
    if (budget - kappa + 1) * step_s <= slack_s:
        return False
    needed = [j * per_step / ((budget - kappa + j) * step_s - slack_s) for j in range(1, kappa + 1)]
    return run.fleet_per_s >= max(per_step / step_s, *needed)


def play(budget: int, uplink_bytes_per_s: float, seed: int, steps: int = STEPS) -> Run:
    """Play one run in virtual time; returns what it has measured.

    Raises:
        EchoError: A checker broke, or the run failed.
    """
    settings = Settings.model_validate(
        {
            "run": {"steps": steps, "seed": 3, "exit_grace_s": 5.0},
            "server": {"host": COORDINATOR, "tls": "off"},
            "task": {"name": TASK},
            "rollouts": {
                "prompts_per_step": GROUPS,
                "samples_per_prompt": SAMPLES,
                "staleness_budget": budget,
                "tokens_max": TOKENS + 16,
                "lease_timeout_s": 60.0,
            },
            "learner": {"checkpoint_every_steps": 1000},
            "membership": {"term_s": 60.0, "heartbeat_s": 2.0},
        }
    )
    peers = tuple(
        PeerSpec(
            f"peer-{number}",
            up_bytes_per_s=FAST_BYTES_PER_S,
            down_bytes_per_s=FAST_BYTES_PER_S,
            latency_s=0.01,
            seconds_per_token=SECONDS_PER_TOKEN,
            leases_at_once=LEASES_AT_ONCE,
            lengths=Lengths(TOKENS, TOKENS),
        )
        for number in range(PEERS)
    )
    worlds: list[World] = []

    async def squeeze(world: World) -> None:
        await world.wait_event("step.done", step=1)  # the model itself has arrived by then
        share = uplink_bytes_per_s / FAST_BYTES_PER_S
        world.squeeze_coordinator(share)
        await world.wait_event("step.done", step=steps - 1)
        world.widen_coordinator(share)  # or the goodbye would stand behind the last version

    async def main() -> None:
        spec = WorldSpec(
            settings=settings,
            peers=peers,
            source_up_bytes_per_s=FAST_BYTES_PER_S,
            learner_step_s=STEP_S,
            learner_ballast=BALLAST,
            learner_changed_share=CHANGED_SHARE,
        )
        worlds.append(World(spec, seed=seed))
        await worlds[0].run(squeeze)

    run_virtual(main, seed=seed)
    (world,) = worlds
    if world.breaches or world.summary is None:
        raise EchoError(f"a run of S = {budget} broke: {world.breaches or 'no summary'}")
    return _measured(world, budget, settings.rollouts.kappa)


def _measured(world: World, budget: int, kappa: int) -> Run:
    published: dict[object, float] = {}
    last_s: dict[object, float] = defaultdict(float)
    sizes: list[float] = []
    for entry in world.trace.entries:
        version = entry.fields.get("version")
        if entry.name == "version.published":
            published[version] = entry.at_s
            size = entry.fields.get("delta_bytes")
            sizes += [float(size)] if isinstance(size, int) else []
        elif entry.name == "version.applied" and version in published:
            last_s[version] = max(last_s[version], entry.at_s - published[version])
    late = [last_s[version] for version in list(last_s)[1:]]  # the first is an anchor
    tokens = [int(str(e.fields["tokens"])) for e in world.trace.named("upload.accepted")]
    generation_s = statistics.mean(tokens) / SAMPLES * SECONDS_PER_TOKEN
    assert world.summary is not None
    return Run(
        staleness_budget=budget,
        kappa=kappa,
        broadcast_s=statistics.median(late) if late else 0.0,
        generation_s=generation_s,
        fleet_per_s=PEERS * LEASES_AT_ONCE * SAMPLES / generation_s,
        idle_share=float(world.summary["learner_idle_share"]),
        delta_bytes=statistics.median(sizes) if sizes else 0.0,
    )


def measure(
    budgets: Sequence[int], broadcasts_s: Sequence[float], seed: int, steps: int = STEPS
) -> list[dict[str, Any]]:
    """Return a row for each budget and time of broadcast, and tell of each on standard error."""
    rows = []
    for budget in budgets:
        quick = play(budget, FAST_BYTES_PER_S, seed, steps)
        for wanted_s in broadcasts_s:
            run = play(budget, quick.delta_bytes / wanted_s, seed, steps)
            rows.append(row_of(run))
            print(
                f"S = {budget}, B = {run.broadcast_s:.1f} s: idle {100 * run.idle_share:.1f} %",
                file=sys.stderr,
                flush=True,
            )
    return rows


def row_of(run: Run) -> dict[str, Any]:
    """Return one run as JSON has it."""
    free = run.idle_share <= IDLE_FREE
    paper, ours = paper_feasible(run), ours_feasible(run)
    return {
        "staleness_budget": run.staleness_budget,
        "kappa": run.kappa,
        "step_s": STEP_S,
        "per_step": GROUPS * SAMPLES,
        "broadcast_s": round(run.broadcast_s, 3),
        "generation_s": round(run.generation_s, 3),
        "fleet_per_s": round(run.fleet_per_s, 3),
        "idle_share": round(run.idle_share, 4),
        "paper_feasible": paper,
        "ours_feasible": ours,
        "paper_right": paper == free,
        "ours_right": ours == free,
    }


def table(result: Mapping[str, Any]) -> str:
    """Return the result for a person."""
    rows = result["rows"]
    first = rows[0]
    lines = [
        f"T = {STEP_S:g} s a step of {first['per_step']} trajectories, G = "
        f"{first['generation_s']:.1f} s, a fleet of {first['fleet_per_s']:.1f} trajectories/s; "
        f"seed {result['seed']}",
        ASSUMED,
        bench_report.stated(),
        f"{'S':>3}{'kappa':>7}{'B':>9}{'idle':>9}   {'paper':<18}ours",
    ]
    for row in rows:
        verdicts = []
        for rule in ("paper", "ours"):
            word = "feasible" if row[f"{rule}_feasible"] else "infeasible"
            verdicts.append(f"{word}{'' if row[f'{rule}_right'] else ' WRONG'}")
        lines.append(
            f"{row['staleness_budget']:>3}{row['kappa']:>7}{row['broadcast_s']:>7.1f} s"
            f"{100 * row['idle_share']:>7.1f} %   {verdicts[0]:<18}{verdicts[1]}"
        )
    for rule in ("paper", "ours"):
        right = sum(row[f"{rule}_right"] for row in rows)
        lines.append(f"{rule}: right in {right} of {len(rows)}")
    lines.append(f"feasible means: idle at most {100 * IDLE_FREE:g} % of the time")
    return "\n".join(lines)


def draw(rows: Sequence[Mapping[str, Any]], seed: int, target: Path) -> None:
    """Write a PNG file; matplotlib (extra ``report``) must be there."""
    figure, axes = pictures.new_figure()
    for budget in dict.fromkeys(row["staleness_budget"] for row in rows):
        mine = [row for row in rows if row["staleness_budget"] == budget]
        axes.plot(
            [row["broadcast_s"] for row in mine],
            [100 * row["idle_share"] for row in mine],
            marker="o",
            label=f"S = {budget}, every {mine[0]['kappa']} steps",
        )
        foreseen = [row for row in mine if row["ours_feasible"]]
        axes.plot(
            [row["broadcast_s"] for row in foreseen],
            [100 * row["idle_share"] for row in foreseen],
            linestyle="",
            marker="o",
            markersize=12,
            markerfacecolor="none",
            color="black",
        )
    axes.axhline(100 * IDLE_FREE, color="black", linestyle=":", linewidth=1)
    axes.set_xlabel("seconds until the last peer has a version")
    axes.set_ylabel("learner idle, %")
    axes.set_title(f"A step takes {STEP_S:g} s; circled: our rule says feasible")
    axes.legend(frameon=False)
    pictures.save(figure, target, ASSUMED, f"seed {seed}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command understands."""
    parser.add_argument("--seed", type=int, default=1, help="of everything random (default: 1)")
    parser.add_argument("--plot", type=Path, help="draw idle share against B into this PNG file")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure as the command line says.

    Raises:
        EchoError: A run broke.
    """
    pictures.check_target(arguments.plot)
    rows = await trio.to_thread.run_sync(measure, BUDGETS, BROADCASTS_S, arguments.seed)
    if arguments.plot is not None:
        draw(rows, arguments.seed, arguments.plot)
    return {
        "seed": arguments.seed,
        "rows": rows,
        "machine": bench_report.machine(),
        "versions": bench_report.versions(),
    }
