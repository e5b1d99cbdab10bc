"""reward.png: how a run went, drawn from its metrics.jsonl.

``python -m coordinator.plots RUN_FOLDER`` draws it anew at any time. A run does so at its end in a
process of its own: matplotlib takes half a second to import and has no place in a network process.
Without matplotlib (extra ``report``) there is no picture, and the run says so.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import trio

from echo2p2p.errors import EchoError

METRICS_FILE: Final = "metrics.jsonl"
PLOT_FILE: Final = "reward.png"
PLOT_S: Final = 60.0
MEAN_STEPS: Final = 10
"""Width of the moving mean, as of the summary's first and last reward."""


class PlotError(EchoError):
    """The picture could not be drawn."""


def surviving(lines: Iterable[str]) -> list[dict[str, Any]]:
    """Return the steps that count, in order: after a rollback the lost ones are told again.

    The last line may be torn by a crash; it is left out.
    """
    steps: list[dict[str, Any]] = []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        while steps and steps[-1]["step"] >= record["step"]:
            steps.pop()
        steps.append(record)
    return steps


def moving_mean(values: list[float], width: int) -> list[float]:
    """Return, for each place, the mean of the ``width`` values that end there."""
    return [fmean(values[max(0, at + 1 - width) : at + 1]) for at in range(len(values))]


async def plot(folder: Path) -> Path | None:
    """Draw a run's picture in a child process; ``None`` without matplotlib.

    Raises:
        PlotError: The child failed, or took too long.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return None
    command = [sys.executable, "-P", "-m", "coordinator.plots", str(folder)]
    with trio.move_on_after(PLOT_S):
        done = await trio.run_process(
            command, capture_stdout=True, capture_stderr=True, check=False
        )
        if done.returncode != 0:
            words = done.stderr.decode(errors="replace").strip().splitlines() or ["no words"]
            raise PlotError(f"{PLOT_FILE} was not drawn: {words[-1]}")
        return folder / PLOT_FILE
    raise PlotError(f"{PLOT_FILE} was not drawn within {PLOT_S:.0f} s")


def draw(steps: list[dict[str, Any]], target: Path) -> None:
    """Draw reward, age and time of each step into a PNG file."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), dpi=120, layout="constrained")
    reward, ages, times = figure.subplots(
        3, 1, sharex=True, gridspec_kw={"height_ratios": (3, 1, 1)}
    )
    x = [step["step"] for step in steps]
    values = _column(steps, "reward")
    reward.plot(x, values, color="#9dbbe0", linewidth=1, label="each step")
    mean = moving_mean(values, MEAN_STEPS)
    reward.plot(x, mean, color="#1f5fae", linewidth=2, label=f"mean of {MEAN_STEPS}")
    reward.set_ylabel("mean reward")
    reward.legend(loc="lower right", frameon=False)
    reward.set_title(target.parent.resolve().name)
    ages.plot(x, _column(steps, "age_mean"), color="#c06a1b", label="mean")
    ages.plot(x, _column(steps, "age_max"), color="#e5b887", linewidth=1, label="largest")
    ages.set_ylabel("age (steps)")
    ages.legend(loc="lower right", frameon=False, ncols=2)
    later = steps[1:] or steps  # waiting for the very first batch is start-up, and would dwarf all
    idle, train = _column(later, "idle_s"), _column(later, "train_s")
    times.stackplot(
        _column(later, "step"),
        train,
        idle,
        colors=("#6aa56a", "#d9d9d9"),
        labels=("training", "idle"),
    )
    times.set_ylabel("seconds")
    times.set_xlabel("step")
    times.legend(loc="upper right", frameon=False, ncols=2)
    for axes in (reward, ages, times):
        axes.grid(visible=True, color="#eeeeee")
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    fresh = target.with_suffix(".new.png")
    figure.savefig(fresh)
    fresh.replace(target)


def _column(steps: list[dict[str, Any]], name: str) -> list[float]:
    return [float(step[name]) for step in steps]


def main(words: list[str]) -> int:
    """Draw the picture of the run in the folder that is named."""
    folder = Path(words[1])
    with (folder / METRICS_FILE).open(encoding="utf-8") as lines:
        steps = surviving(lines)
    if steps:
        draw(steps, folder / PLOT_FILE)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
