"""What a played story amounts to: figures from its trace, and a table for people."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from scenarios.world import COORDINATOR, World


def figures(world: World) -> dict[str, Any]:
    """Return what a run has come to; all times are virtual seconds."""
    trace, summary = world.trace, world.summary or {}
    strikes = Counter(str(entry.fields["fault"]) for entry in trace.named("nemesis.strikes"))
    lines = {name: world.network.traffic(name) for name in (COORDINATOR, *world.machines)}
    ages = Counter(int(str(entry.fields["age_max"])) for entry in trace.named("step.done"))
    return {
        "virtual_s": trace.entries[-1].at_s if trace.entries else 0.0,
        "events": len(trace.entries),
        "peers": len(world.machines),
        "steps": summary.get("steps"),
        "idle_share": summary.get("learner_idle_share"),
        "trajectories": summary.get("trajectories"),
        "age_max_by_steps": {str(age): count for age, count in sorted(ages.items())},
        "versions": _versions(world),
        "converged_s": world.watch.converged_s,
        "strikes": dict(sorted(strikes.items())),
        "bytes": {
            name: {"sent": line.sent_bytes, "received": line.received_bytes}
            for name, line in lines.items()
        },
        "fullest": {
            what: [fill.now, fill.limit] for what, fill in sorted(world.watch.fullest.items())
        },
    }


def _versions(world: World) -> dict[str, Any]:
    """Return how fast versions came to the engines that proved them."""
    published: dict[object, float] = {}
    reached: dict[object, list[float]] = defaultdict(list)
    for entry in world.trace.entries:
        version = entry.fields.get("version")
        if entry.name == "version.published":
            published[version] = entry.at_s
        elif entry.name == "version.loaded" and version in published:
            reached[version].append(entry.at_s - published[version])
    waits = sorted(wait for each in reached.values() for wait in each)
    last = sorted(max(each) for each in reached.values())
    return {
        "published": len(published),
        "reached_s": {share: _quantile(waits, float(share)) for share in ("0.5", "0.95", "1")},
        "last_peer_median_s": _quantile(last, 0.5),
    }


def _quantile(ordered: Sequence[float], share: float) -> float | None:
    """Return a quantile of sorted values; the nearest rank."""
    if not ordered:
        return None
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 4)


def table(result: Mapping[str, Any]) -> str:
    """Return the result for a terminal."""
    lines = [
        f"{result['story']} with seed {result['seed']}: {result['peers']} peers, "
        f"{result['virtual_s']:.1f} virtual seconds, {result['events']} events"
    ]
    if result["steps"] is not None:
        counts, versions = result["trajectories"], result["versions"]
        rejected = counts["rejected"]
        reached = versions["reached_s"]
        lines += [
            f"  steps         {result['steps']}, idle {100 * result['idle_share']:.1f} %",
            f"  trajectories  {counts['issued']} issued = {counts['trained']} trained + "
            f"{counts['queued']} queued + {counts['in_flight']} in flight + "
            f"{sum(rejected.values())} rejected",
            *(f"    {count:>10}  {reason}" for reason, count in rejected.items()),
            f"  oldest age    {_by(result['age_max_by_steps'])} (age: steps)",
            f"  versions      {versions['published']}, in the engines after "
            f"{reached['0.5']} s (half), {reached['0.95']} s (95 %), {reached['1']} s (all)",
        ]
    lines.append(f"  strikes       {_by(result['strikes']) or 'none'}")
    lines += _bytes(result["bytes"])
    if result["converged_s"] is not None:
        lines.append(f"  converged at  {result['converged_s']:.1f} s")
    lines += [f"  BROKEN  {problem}" for problem in result["problems"]]
    lines.append(f"  trace         {result['trace']}")
    lines.append("  every checker held" if result["held"] else f"  replay: {result['replay']}")
    return "\n".join(lines)


def _by(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{key}: {count}" for key, count in counts.items())


def _bytes(lines: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return the coordinator's bytes, and those of its peers by rank."""
    peers = sorted((line["sent"] for name, line in lines.items() if name != COORDINATOR))
    source = lines[COORDINATOR]
    middle = peers[len(peers) // 2] if peers else 0
    return [
        f"  bytes sent    coordinator {source['sent'] / 1e6:.2f} MB; peers "
        f"{sum(peers) / 1e6:.2f} MB in all, {middle / 1e6:.2f} MB the middle one, "
        f"{(peers[-1] if peers else 0) / 1e6:.2f} MB the most"
    ]
