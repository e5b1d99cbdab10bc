"""One volunteer's machine in the virtual world: what it is, what runs on it, what it keeps.

`PeerSpec` is what a story says of it, `WorldSpec` of all of them. `Machine` is the machine itself:
identity, disk, clock, line, pace and lies outlive the peer process, which is started, killed and
started again on it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final, Literal

import trio

from coordinator.config import Settings
from echo2p2p.errors import EchoError
from echo2p2p.net.trust import PeerIdentity
from echo2p2p.testing.clock import SimClock
from echo2p2p.testing.disk import SimDisk
from echo2p2p.testing.stopping import SimProcess
from echo2p2p.testing.system import SimEntropy
from peer.app import PeerApp
from scenarios.costs import Costs
from scenarios.fake_engine import FakeEngine, Lengths
from scenarios.fake_learner import LearnerFaults
from scenarios.lies import Lies
from scenarios.parts import Pace

COORDINATOR: Final = "coordinator"
"""The machine that all others know."""
PAGE_BYTES: Final = 4096
TORN_SHARE: Final = 0.1
GRACE_S: Final = 20.0
"""After a fault is over its victim may still be evicted for what happened meanwhile: two terms."""


@dataclass(frozen=True)
class PeerSpec:
    """One simulated machine."""

    name: str
    up_bytes_per_s: float = 2.5e6
    down_bytes_per_s: float = 5e6
    latency_s: float = 0.02
    """One way, to the middle of the network."""
    loss: float = 0.0
    """Share of packets."""
    start_s: float = 2.0
    """Of the engine."""
    load_s: float = 0.05
    """Of a version into the engine."""
    seconds_per_token: float = 0.1
    leases_at_once: int = 2
    switch: Literal["finish", "in-flight"] = "finish"
    lengths: Lengths = field(default_factory=Lengths)
    """Of the thinking before an answer."""
    nat: bool = False
    """Nobody can dial it."""
    clock_ahead_s: float = 0.0
    """Its clock is wrong by so much."""
    price_usd_per_hour: float = 0.0
    data_cap_per_day: int | None = None
    """Bytes."""
    joins_s: float | None = 0.0
    """When it is switched on; ``None``: not before a fault does so."""


@dataclass(frozen=True)
class WorldSpec:
    """Everything but the seed."""

    settings: Settings
    peers: tuple[PeerSpec, ...]
    source_up_bytes_per_s: float = 2.5e6
    source_down_bytes_per_s: float = 1.25e8
    source_latency_s: float = 0.0
    learner_start_s: float = 3.0
    learner_step_s: float = 1.0
    learner_save_s: float = 0.0
    learner_changed_share: float = 0.02
    """Of the elements, in a step."""
    learner_ballast: int = 0
    """Further elements of the model."""
    learner_finds: bool = False
    """Whether it lists what changed, as one on a GPU does."""
    learner_faults: tuple[LearnerFaults, ...] = ()
    """One a life of the learner; later lives have none."""
    costs: Costs | None = None
    """Of work, as on the machine that plays a live story; ``None``: it takes no time."""
    stop_s: float | None = None
    """The run is stopped then, if it has not ended; ``None``: never."""


@dataclass
class Machine:
    """A machine and what runs on it now."""

    spec: PeerSpec
    entropy: SimEntropy
    identity: PeerIdentity
    disk: SimDisk
    files: dict[str, bytearray]
    """Payloads that it keeps over its restarts."""
    clock: SimClock
    lies: Lies
    pace: Pace = field(default_factory=Pace)
    process: SimProcess = field(default_factory=SimProcess)
    engine: FakeEngine | None = None
    """Of the present life."""
    app: PeerApp | None = None
    scope: trio.CancelScope | None = None
    lives: int = 0
    outcome: str | None = None
    """How the last life ended: ``finished``, ``failed``, ``killed``, or an error's text."""
    honest: bool = True
    """It has never lied."""
    excused_until_s: float = -math.inf
    """Until then nobody may wonder if it is evicted, or has links broken."""
    expected: bool = True
    """It is switched on, or will be: it has not departed."""
    faults: int = 0
    """Under way on it now."""

    def __post_init__(self) -> None:
        self._tearing = self.entropy.rng("torn pages")

    @classmethod
    def create(cls, spec: PeerSpec, entropy: SimEntropy) -> Machine:
        """Return a new machine that nothing runs on."""
        return cls(
            spec=spec,
            entropy=entropy,
            identity=PeerIdentity.create(entropy),
            disk=SimDisk(rng=entropy.rng("disk")),
            files={},
            clock=SimClock(spec.clock_ahead_s),
            lies=Lies(entropy.rng("lies")),
            expected=spec.joins_s is not None,
        )

    @property
    def running(self) -> bool:
        """Whether a peer runs on it."""
        return self.scope is not None

    def excused(self, now: float) -> bool:
        """Whether what happens to it is the nemesis's doing."""
        return self.faults > 0 or now < self.excused_until_s

    def harm_begins(self) -> None:
        """A fault is upon it."""
        self.faults += 1

    def harm_ends(self) -> None:
        """It is over."""
        self.faults -= 1
        self.excused_until_s = trio.current_time() + GRACE_S

    def tear_files(self) -> None:
        """Lose what a power cut may lose of pages that nobody had synced: any of them."""
        for name in sorted(self.files):
            data = self.files[name]
            for start in range(0, len(data), PAGE_BYTES):
                if self._tearing.random() < TORN_SHARE:
                    end = min(len(data), start + PAGE_BYTES)
                    data[start:end] = bytes(end - start)

    def lose_disk(self) -> None:
        """Come back as a stranger: a new identity and an empty disk."""
        self.entropy = self.entropy.fork("after the disk was lost")
        self.identity = PeerIdentity.create(self.entropy)
        self.disk, self.files = SimDisk(rng=self.entropy.rng("disk")), {}

    def ended(self, error: EchoError | None, outcome: str | None) -> None:
        """Note how a life ended."""
        self.scope = self.app = self.engine = None
        self.outcome = outcome if error is None else f"{type(error).__name__}: {error}"
