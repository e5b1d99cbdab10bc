"""Tasks by name. A dictionary, so that a reader sees all there is; options are checked here.

A name with a colon, ``package.module:ClassName``, is a task of the user's own: the class is called
with the options as keyword arguments. Its module is imported by whoever makes the task, which is
the task worker and, for a warm start, the learner: child processes, both. The network process
never does; `check_task` tells it what can be told without importing anything.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Final

from echo2p2p.errors import ConfigError
from echo2p2p.tasks.base import Task
from echo2p2p.tasks.reasoning import ReasoningGym, check_options
from echo2p2p.tasks.sort_digits import SortDigits

LENGTH_MAX: Final = 32
PARTS: Final = ("name", "turns_max", "item", "prompt", "verdict", "demonstrations")
"""What a task of one's own must have; see `echo2p2p.tasks.base.Task`."""


def make_task(name: str, options: Mapping[str, object]) -> Task:
    """Return the task of this name; imports the user's module if it is one of theirs.

    Raises:
        ConfigError: No such task, an option that it does not have, or a value out of range; or
            the user's code raised.
    """
    check_task(name, options)
    if ":" in name:
        return _load(name, options)
    return TASKS[name](options)


def check_task(name: str, options: Mapping[str, object]) -> None:
    """Check what can be checked without running anybody's code.

    Raises:
        ConfigError: As `make_task`, for the tasks of this package; a malformed name.
    """
    if ":" in name:
        module, _, attribute = name.partition(":")
        if not all(part.isidentifier() for part in (*module.split("."), *attribute.split("."))):
            raise ConfigError("task.name", f"{name!r} is not package.module:ClassName")
        return
    maker = TASKS.get(name)
    if maker is None:
        known = ", ".join(sorted(TASKS))
        raise ConfigError(
            "task.name",
            f"no task {name!r}; there are: {known}; your own is package.module:ClassName",
        )
    if name == ReasoningGym.name:
        check_options(options)  # to make one imports the package
    else:
        maker(options)


def _load(name: str, options: Mapping[str, object]) -> Task:
    module_name, _, attribute = name.partition(":")
    try:
        maker: object = importlib.import_module(module_name)
    except Exception as error:  # the user's code may raise anything
        mend = "install it beside this package, or put its folder into PYTHONPATH"
        raise ConfigError(
            "task.name", f"cannot import {module_name} ({_told(error)}): {mend}"
        ) from error
    for part in attribute.split("."):
        maker = getattr(maker, part, None)
    if not callable(maker):
        raise ConfigError("task.name", f"{module_name} has no class {attribute}")
    try:
        task = maker(**options)
    except Exception as error:  # the user's code may raise anything
        given = ", ".join(sorted(options)) or "none"
        raise ConfigError(
            "task.options", f"{name} does not take them ({_told(error)}); given: {given}"
        ) from error
    for part in PARTS:
        if not hasattr(task, part):
            raise ConfigError(
                "task.name", f"{name} is no task: it has no {part}; see echo2p2p.tasks.base"
            )
    made: Task = task
    return made


def _told(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


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
    ReasoningGym.name: ReasoningGym,
    SortDigits.name: _sort_digits,
}
