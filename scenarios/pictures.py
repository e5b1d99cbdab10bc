"""PNG files of benchmarks and claims; what would go wrong is said before the work begins."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from echo2p2p.errors import ConfigError, EchoError
from scenarios import bench_report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def check_target(target: Path | None) -> None:
    """Say whether a picture can be drawn into this file; ``None``: none is wanted.

    Raises:
        EchoError: matplotlib (extra ``report``) is missing.
        ConfigError: There is no such folder.
    """
    if target is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise EchoError("--plot needs matplotlib: pip install 'echo2p2p[report]'")
    if not target.parent.is_dir():
        raise ConfigError("--plot", f"there is no folder {target.parent}: make it first")


def new_figure() -> tuple[Figure, Axes]:
    """Return an empty picture with one pair of axes."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    return figure, figure.subplots()


def save(figure: Figure, target: Path, *stated: str) -> None:
    """Write the file; below the picture stands what its figures hold for.

    Args:
        figure: The picture.
        target: The file.
        stated: Seeds and assumptions; machine and versions are added.

    Raises:
        EchoError: It cannot be written.
    """
    figure.supxlabel("; ".join([*stated, bench_report.stated()]), fontsize=6, color="#555555")
    try:
        figure.savefig(target, format="png")
    except OSError as error:
        raise EchoError(f"cannot write {target}: {error.strerror}") from error
