"""Tasks by name. A dictionary, so that a reader sees all there is; options are checked here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from echo2p2p.errors import ConfigError
from echo2p2p.tasks.base import Task
from echo2p2p.tasks.sort_digits import SortDigits

LENGTH_MAX: Final = 32


def make_task(name: str, options: Mapping[str, object]) -> Task:
    """Return the task of this name.

    Raises:
        ConfigError: No such task, an option that it does not have, or a value out of range.
    """
    maker = TASKS.get(name)
    if maker is None:
        raise ConfigError("task.name", f"no task {name!r}; there are: {', '.join(sorted(TASKS))}")
    return maker(options)


def _sort_digits(options: Mapping[str, object]) -> Task:
    _refuse_unknown(options, {"length"})
    return SortDigits(length=_whole_number(options, "length", default=4, low=1, high=LENGTH_MAX))


def _refuse_unknown(options: Mapping[str, object], known: set[str]) -> None:
    for key in options:
        if key not in known:
            raise ConfigError(
                f"task.options.{key}", f"no such option; there are: {', '.join(sorted(known))}"
            )


def _whole_number(
    options: Mapping[str, object], key: str, *, default: int, low: int, high: int
) -> int:
    value = options.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(
            f"task.options.{key}", f"{value!r} is not a whole number from {low} to {high}"
        )
    return value


TASKS: Final[Mapping[str, Callable[[Mapping[str, object]], Task]]] = {
    SortDigits.name: _sort_digits,
}
