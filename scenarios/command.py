"""``echo2-scenario``: run a story, in virtual time or as processes; measure a part.

The module of a command is imported when the command is chosen: all of them take longer to import
than most of them take to answer.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any, Final

from echo2p2p.net.program import FAILED, OK, run_program

Call = Callable[[ModuleType, argparse.Namespace], int]
"""Runs a command, given its module and its options; returns the exit code."""


def _call_main(module: ModuleType, arguments: argparse.Namespace) -> int:
    """Run a module that prints by itself."""
    return int(module.main(arguments))


def _measured(held: Callable[[Any], bool]) -> Call:
    """Return how to run a module whose `run` gives a result, of which `table` makes text.

    `held` says of a result whether what must hold did; no time is ever part of that.
    """

    async def measure(module: ModuleType, arguments: argparse.Namespace) -> int:
        result = await module.run(arguments)
        print(json.dumps(result, indent=2) if arguments.json else module.table(result))
        return OK if held(result) else FAILED

    return lambda module, arguments: run_program(partial(measure, module, arguments))


@dataclass(frozen=True, slots=True)
class Command:
    """A command: a module of this package with `add_arguments` and what `call` needs."""

    module: str
    about: str
    call: Call = _call_main


_HELD: Final = _measured(lambda result: bool(result["held"]))
COMMANDS: Final = {
    "list": Command("list_command", "name the stories"),
    "run": Command("story_command", "run one story"),
    "new": Command("new_command", "write a commented story to begin with"),
    "swarm": Command("swarm_command", "play many stories drawn from seeds"),
    "torture": Command(
        "torture", "kill -9 a coordinator under load at random moments, and look at what is left"
    ),
    "soak": Command("soak", "watch the memory of real processes while peers come and go", _HELD),
    "compare": Command("compare", "lay two results of `run --json` beside each other"),
    "agree": Command(
        "agree",
        "play stories in virtual time and with real processes, and see whether figures agree",
        _measured(lambda result: bool(result["agree"])),
    ),
}
BENCHES: Final = {
    "broadcast": Command(
        "bench_broadcast",
        "how long until the last peer has a payload, and who sent it?",
        _measured(bool),  # a peer that does not have the payload, verified, is an error
    ),
    "costs": Command("bench_costs", "what work costs on this machine, in CPU time", _HELD),
    "delta": Command(
        "bench_delta",
        "how small and how fast are weight deltas, beside what others do?",
        _measured(lambda rows: all(row["exact"] for row in rows)),
    ),
    "engine": Command(
        "bench_engine", "what does it cost that vLLM's weights change and are proved?", _HELD
    ),
    "intake": Command(
        "bench_intake", "what does one upload cost a coordinator whom many wait for?", _HELD
    ),
}
CLAIMS: Final = {
    "broadcast": Command(
        "reproduce_broadcast",
        "how does the time of a broadcast grow with the peers?",
        _measured(lambda _: True),
    ),
    "faults": Command(
        "reproduce_faults",
        "what does a run lose when some of its peers fail?",
        _measured(lambda _: True),
    ),
    "overlap": Command(
        "overlap",
        "is the broadcast hidden, and which rule foresees it?",
        _measured(lambda _: True),
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="echo2-scenario", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Lazy)
    _add(commands, COMMANDS)
    for group, about, inner in (
        ("bench", "measure one part, for real", BENCHES),
        ("reproduce", "put a claim of the paper to the test", CLAIMS),
    ):
        of_group = commands.add_parser(group, help=about)
        _add(of_group.add_subparsers(dest="name", required=True, parser_class=_Lazy), inner)
    known, more = parser.parse_known_args(argv)
    if more and not (known.command == "run" and known.name == "demo"):
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    known.more = more
    chosen: Command = known.chosen
    return chosen.call(_module(chosen), known)


def _add(
    commands: argparse._SubParsersAction[_Lazy],
    table: dict[str, Command],
) -> None:
    for name, command in table.items():
        one = commands.add_parser(name, help=command.about, description=command.about)
        one.set_defaults(chosen=command)


def _module(command: Command) -> ModuleType:
    return import_module(f"scenarios.{command.module}")


class _Lazy(argparse.ArgumentParser):
    """Gets its options from its command's module when it is the one that is chosen."""

    def parse_known_args(  # type: ignore[override]  # its overloads differ in the namespace's type
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[Any, list[str]]:
        command = self.get_default("chosen")
        if command is not None:
            _module(command).add_arguments(self)
        return super().parse_known_args(args, namespace)
