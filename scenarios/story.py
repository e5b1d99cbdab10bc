"""A story: what there is, what goes wrong, and what must hold all the same, as a short TOML file.

Nothing in it is code. Wherever a range may stand, each peer (or each strike) draws its own value
from the run's seed. A story is checked when it is read: whatever is wrong names its key.
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, ValidationError, model_validator

from coordinator.config import Settings
from echo2p2p.errors import ConfigError
from peer.config import Cap, Section
from scenarios.fake_engine import Lengths
from scenarios.faults import (
    AnyFault,
    Arrive,
    NotNegative,
    PeerFault,
    Range,
    Share,
    ShareRange,
    drawn,
)
from scenarios.machines import PeerSpec
from scenarios.world import COORDINATOR, WorldSpec

STORIES: Final = Path(__file__).parent / "stories"
TASK: Final = "scenarios.thinking:SortAfterThinking"
PROMPT_TOKENS: Final = 16
"""Kept free in the fake model's 128 positions for a prompt, an answer and its end."""
SETTLE_S: Final = 5.0
"""At least so long a run must go on after it had to converge, so that its rate can be told."""


class WorldSection(Section):
    """The run as a whole, and the coordinator's machine."""

    stop_s: Annotated[float, Field(gt=0)] = 120.0
    """Virtual time at which the run is stopped."""
    heal_s: Annotated[float, Field(gt=0)] | None = None
    """From then on nothing is broken on purpose; default: two thirds of `stop_s`."""
    source_up: Range = (2.5e7, 2.5e7)
    """The coordinator's uplink, bytes a second or such as ``"200Mbit"``."""
    source_latency_ms: NotNegative = 5.0
    """One way, to the middle of the network."""
    learner_start_s: NotNegative = 3.0
    """Until a learner is up."""
    learner_step_s: Annotated[float, Field(gt=0)] = 1.0
    """T."""
    learner_save_s: NotNegative = 0.2
    """For a checkpoint."""
    learner_changed_share: Share = 0.02
    """Of the weights, in a step: how long a version is."""
    model_ballast: Annotated[int, Field(ge=0, le=100_000_000)] = 0
    """Further elements of the model, which has 49,000 without."""

    @property
    def healed_s(self) -> float:
        """`heal_s` as used."""
        return 2 * self.stop_s / 3 if self.heal_s is None else self.heal_s


class PeersSection(Section):
    """A group of machines."""

    name: Annotated[str, Field(pattern=r"[a-z][a-z-]{0,20}")] = "peer"
    """Its peers are called by this name and a number."""
    count: Annotated[int, Field(ge=1, le=5000)] = 8
    """How many."""
    up: Range = (2.5e6, 2.5e6)
    """Uplink, bytes a second or such as ``"20Mbit"``."""
    down: Range = (5e6, 5e6)
    """Downlink."""
    latency_ms: Range = (20.0, 20.0)
    """One way, to the middle of the network."""
    loss: ShareRange = (0.0, 0.0)
    """Share of packets that its line loses."""
    nat_share: Share = 0.0
    """Share of them that nobody can dial."""
    engine_start_s: Range = (2.0, 2.0)
    """Until an engine is up."""
    engine_load_s: Range = (0.05, 0.05)
    """For a version into the engine."""
    seconds_per_token: Range = (0.05, 0.05)
    """Of an engine, for a batch."""
    leases_at_once: Annotated[int, Field(ge=1, le=64)] = 2
    """Of an engine's batch."""
    engine_switch: Literal["finish", "in-flight"] = "finish"
    """What becomes of answers under way when a version comes, as a volunteer may set it."""
    tokens: Range = (0.0, 0.0)
    """Lengths of the thinking before an answer, shortest and longest."""
    tokens_tail: bool = False
    """Most are short and few are long (Pareto), instead of all alike."""
    clock_ahead_s: float = 0.0
    """Their clocks are wrong by so much."""
    price_usd_per_hour: Range = (0.0, 0.0)
    """Told to the coordinator; nothing is decided by it yet."""
    data_cap_per_day: Cap | None = None
    """Of each, as a volunteer may set it."""
    joins_s: Range | Literal["later"] = (0.0, 0.0)
    """When they are switched on; ``"later"``: by the fault ``arrive`` only."""


class ChecksSection(Section):
    """What this story promises beyond what always holds."""

    converge_s: Annotated[float, Field(gt=0)] = 30.0
    """So long after healing every live peer has a version that is as new as the newest then."""
    steps_per_s_min: NotNegative = 0.0
    """From then on."""
    idle_share_max: Share = 1.0
    """Of the learner, over the whole run."""
    steps_min: Annotated[int, Field(ge=0)] = 1
    """Of the whole run."""


class Story(Section):
    """One file."""

    about: str = ""
    """One line for a list."""
    world: WorldSection = WorldSection()
    """The run as a whole, and the coordinator's machine."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Of the coordinator, as in its own file; see ``echo2-coordinator run --help``."""
    peers: list[PeersSection] = Field(default_factory=lambda: [PeersSection()], min_length=1)
    """Groups of machines."""
    nemesis: list[AnyFault] = Field(default_factory=list)
    """What goes wrong."""
    checks: ChecksSection = ChecksSection()
    """What this story promises beyond what always holds."""

    @model_validator(mode="after")
    def _related(self) -> Self:
        world, checks = self.world, self.checks
        least = world.healed_s + checks.converge_s + SETTLE_S
        if world.stop_s < least:
            raise ValueError(
                f"world.stop_s {world.stop_s:g} leaves no time to converge: healing at "
                f"{world.healed_s:g} and checks.converge_s {checks.converge_s:g} need {least:g}"
            )
        names = [group.name for group in self.peers]
        if len(set(names)) != len(names):
            raise ValueError("peers: two groups have the same name")
        for number, fault in enumerate(self.nemesis):
            if isinstance(fault, PeerFault) and fault.on not in {"all", *names}:
                known = ", ".join(names)
                raise ValueError(f"nemesis.{number}.on: no group {fault.on!r}; there are {known}")
            if isinstance(fault, Arrive) and not any(
                group.joins_s == "later" and fault.on in {"all", group.name} for group in self.peers
            ):
                raise ValueError(f'nemesis.{number}: nobody there has joins_s = "later"')
        self.coordinator()
        return self

    def coordinator(self) -> Settings:
        """Return the coordinator's settings: the story's over those that suit a small world."""
        longest = max(group.tokens[1] for group in self.peers)
        given = _merged(
            {
                "run": {"steps": 1_000_000, "seed": 3, "exit_grace_s": 5.0},
                "server": {"host": COORDINATOR, "tls": "off"},
                "task": {"name": TASK},
                "rollouts": {
                    "prompts_per_step": 8,
                    "samples_per_prompt": 4,
                    "tokens_max": int(longest) + PROMPT_TOKENS,
                    "lease_timeout_s": 30.0,
                },
                "learner": {"checkpoint_every_steps": 10},
                "weights": {"chunk_bytes_min": 1024},
            },
            self.settings,
        )
        try:
            return Settings.model_validate(given)
        except ValidationError as error:
            raise ValueError(f"settings.{_first(error)}") from error

    def draw(self, rng: random.Random) -> WorldSpec:
        """Return the world of one seed."""
        peers = [
            _draw_peer(group, f"{group.name}-{number}", rng)
            for group in self.peers
            for number in range(group.count)
        ]
        world = self.world
        return WorldSpec(
            settings=self.coordinator(),
            peers=tuple(peers),
            source_up_bytes_per_s=drawn(world.source_up, rng),
            source_latency_s=world.source_latency_ms / 1000,
            learner_start_s=world.learner_start_s,
            learner_step_s=world.learner_step_s,
            learner_save_s=world.learner_save_s,
            learner_changed_share=world.learner_changed_share,
            learner_ballast=world.model_ballast,
            stop_s=world.stop_s,
        )


def read_story(text: str, source: str) -> Story:
    """Return the story of a TOML text.

    Raises:
        ConfigError: It is none; names the key.
    """
    try:
        return Story.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(source, f"not TOML: {error}") from error
    except ValidationError as error:
        raise ConfigError(source, _first(error)) from error


def load_story(name: str) -> Story:
    """Return a shipped story by name, or anybody's by the path of its file.

    Raises:
        ConfigError: There is none, or it is wrong.
    """
    path = Path(name) if name.endswith(".toml") else STORIES / f"{name}.toml"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        detail = f"no such story ({error.strerror}); `echo2-scenario list` names them"
        raise ConfigError(name, detail) from error
    return read_story(text, str(path) if name.endswith(".toml") else name)


def shipped() -> dict[str, Story]:
    """Return the stories that come with the package, by name."""
    return {path.stem: load_story(path.stem) for path in sorted(STORIES.glob("*.toml"))}


def shipped_apart() -> dict[str, Story]:
    """Return those in folders: large ones, and those for real processes."""
    names = sorted(path.relative_to(STORIES) for path in STORIES.glob("*/*.toml"))
    return {str(name.with_suffix("")): load_story(str(name.with_suffix(""))) for name in names}


def _first(error: ValidationError) -> str:
    """Return the first thing that is wrong, with its key."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    more = error.error_count() - 1
    text = first["msg"].removeprefix("Value error, ")
    return f"{key + ': ' if key else ''}{text}{f' (and {more} more)' if more else ''}"


def _merged(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(low)
    for key, value in high.items():
        below = result.get(key)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        result[key] = _merged(below, value) if both else value  # type: ignore[arg-type]
    return result


def _draw_peer(group: PeersSection, name: str, rng: random.Random) -> PeerSpec:
    joins_s = None if isinstance(group.joins_s, str) else drawn(group.joins_s, rng)
    return PeerSpec(
        name=name,
        up_bytes_per_s=drawn(group.up, rng),
        down_bytes_per_s=drawn(group.down, rng),
        latency_s=drawn(group.latency_ms, rng) / 1000,
        loss=drawn(group.loss, rng),
        start_s=drawn(group.engine_start_s, rng),
        load_s=drawn(group.engine_load_s, rng),
        seconds_per_token=drawn(group.seconds_per_token, rng),
        leases_at_once=group.leases_at_once,
        switch=group.engine_switch,
        lengths=Lengths(int(group.tokens[0]), int(group.tokens[1]), group.tokens_tail),
        nat=rng.random() < group.nat_share,
        clock_ahead_s=group.clock_ahead_s,
        price_usd_per_hour=drawn(group.price_usd_per_hour, rng),
        data_cap_per_day=group.data_cap_per_day,
        joins_s=joins_s,
    )
