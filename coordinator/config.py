"""Settings of a coordinator: TOML file, then ``--section.key value`` on top; unknown keys refused.

Every default carries its reason. Relations between settings are checked in `Settings`; whatever
is wrong becomes a `ConfigError` with the key's path.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from echo2p2p.broadcast.overlay import DEGREE
from echo2p2p.limits import (
    CHUNK_BYTES_MAX,
    CHUNK_BYTES_MIN,
    HTTP_BODY_BYTES_MAX,
    MIB,
    SAMPLES_PER_LEASE_MAX,
    TOKENS_PER_SAMPLE_MAX,
)
from echo2p2p.rollouts.admission import default_publication_period

Positive = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0)]

LOOPBACK_HOSTS: Final = frozenset({"127.0.0.1", "::1", "localhost"})
"""Names of this machine that no other machine can reach."""
UPLOAD_BYTES_PER_TOKEN: Final = 8
"""An id and a log-prob. Half of a body is kept free for what surrounds them."""
UPLOAD_BYTES_PER_SAMPLE: Final = 1024
"""Names of fields, and spans of a few versions."""
GROUP_BYTES_PER_SAMPLE: Final = 1024
"""Two arrays and what surrounds them, in memory."""
HELD_OUT_ITEMS_MAX: Final = 10_000
"""Their prompts and answers are one message to the task worker and one to the learner."""
BATCH_BYTES_MAX: Final = 3 * 1024 * MIB
"""Of answers in one call of the learner; a message to a child takes 4 GiB with its prompts."""
UPLOAD_BYTES_BASE: Final = 64 * 1024
"""What is not worth counting."""


class Section(BaseModel):
    """Base of all sections."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class RunSection(Section):
    """The run as a whole."""

    folder: str = "runs/run"
    """Everything that the run keeps: store, payloads, checkpoints, metrics, summary."""
    steps: Positive = 1000
    """Optimizer steps after which the run is finished."""
    seed: int = 0
    """Of items, sampling and initial weights."""
    exit_grace_s: PositiveFloat = 5.0
    """At the end, how long peers may take to hear that the run is over."""


class ServerSection(Section):
    """Where the coordinator is reached."""

    host: str = "127.0.0.1"
    """Address to bind. Off loopback TLS is on unless `tls` says otherwise."""
    port: Annotated[int, Field(ge=0, le=65535)] = 7070
    """HTTP(S) port; 0 takes a free one and prints it."""
    public_url: str | None = None
    """How peers reach it, if not by host and port; needed with ``host`` 0.0.0.0 or ::."""
    relay_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """TCP port of the coordinator's own relay; 0 takes a free one."""
    relay_public_host: str | None = None
    """How peers reach the relay, if not by the host of `public_url`, or `host`."""
    relay_public_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Port by which peers reach the relay, where a router maps another one to `relay_port`."""
    tls: Literal["auto", "on", "off"] = "auto"
    """``auto``: off on loopback, on elsewhere."""

    @property
    def uses_tls(self) -> bool:
        """`tls` as used."""
        return self.tls == "on" or (self.tls == "auto" and self.host not in LOOPBACK_HOSTS)


class ModelSection(Section):
    """The model that is trained."""

    path: str = "@tiny-qwen3"
    """A Hugging Face folder, or a preset (``@tiny-qwen3``: 0.6 M parameters, made on the spot;
    ``@smollm2``: a chat model of 135 M, by ``echo2-coordinator fetch @smollm2``)."""


class TaskSection(Section):
    """What is rolled out and how it is scored."""

    name: str = "sort_digits"
    """A task of this package, or one of your own as ``package.module:ClassName``."""
    options: dict[str, int | float | str | bool] = {}
    """Passed to the task."""
    item_timeout_s: PositiveFloat = 60.0
    """The task's code may take this long over one item; after that it is killed."""
    memory_max_bytes: Positive = 4_000_000_000
    """Memory that the task's process may use; one that uses more is killed."""


class HeldOutSection(Section):
    """Measuring on items that are never trained on."""

    items: Annotated[int, Field(ge=0, le=HELD_OUT_ITEMS_MAX)] = 0
    """How many the learner answers before the first step and after the last, greedily; 0: none.
    Of 200 the 95 % interval is up to ±0.07 wide, of 1,000 ±0.03."""


class RolloutsSection(Section):
    """How many trajectories a step consumes, and how old they may be."""

    prompts_per_step: Positive = 32
    """Groups in a batch."""
    samples_per_prompt: Annotated[int, Field(ge=2, le=SAMPLES_PER_LEASE_MAX)] = 8
    """Rollouts in a group; one has no group mean."""
    staleness_budget: Annotated[int, Field(ge=0)] = 3
    """S: largest age, in steps, that may be trained on."""
    publication_period: Positive | None = None
    """κ: steps between publications; default max(1, S - 1)."""
    tokens_max: Annotated[int, Field(gt=0, le=TOKENS_PER_SAMPLE_MAX)] = 256
    """Longest answer, in tokens."""
    temperature: PositiveFloat = 1.0
    """Of sampling; log-probs are of the tempered distribution."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus; 1 keeps all."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """0 keeps all."""
    lease_timeout_s: PositiveFloat = 300.0
    """A lease not answered by then is given to another peer."""
    queue_bytes_max: Positive = 4 * 1024 * MIB
    """Memory for rollouts that wait for a step. No leases are given whose answers, if they were as
    long as they may be, would not fit beside what there is."""

    @property
    def kappa(self) -> int:
        """κ as used."""
        return self.publication_period or default_publication_period(self.staleness_budget)

    @property
    def batch(self) -> int:
        """R: trajectories a step."""
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def group_bytes_max(self) -> int:
        """Memory of one accepted group whose answers are as long as they may be; no prompt."""
        return self.samples_per_prompt * (
            GROUP_BYTES_PER_SAMPLE + UPLOAD_BYTES_PER_TOKEN * self.tokens_max
        )

    @property
    def upload_bytes_max(self) -> int:
        """Longest body that answers a lease of these settings; twice what it should need."""
        sample_bytes = UPLOAD_BYTES_PER_SAMPLE + 2 * UPLOAD_BYTES_PER_TOKEN * self.tokens_max
        whole = UPLOAD_BYTES_BASE + self.samples_per_prompt * sample_bytes
        return min(HTTP_BODY_BYTES_MAX, whole)


class WarmStartSection(Section):
    """Supervised steps before version 0, on the task's own demonstrations."""

    steps: Annotated[int, Field(ge=0)] = 0
    """0: none."""
    batch: Positive = 256
    """Examples a step."""
    learning_rate: PositiveFloat = 2e-3
    """AdamW."""
    warmup_steps: Annotated[int, Field(ge=0)] = 20
    """Linear."""


class LearnerSection(Section):
    """GRPO."""

    learning_rate: PositiveFloat = 1e-6
    """AdamW; 1e-6 is usual for models of billions of parameters."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW."""
    warmup_steps: Annotated[int, Field(ge=0)] = 10
    """Linear warm-up of the learning rate."""
    gradient_norm_max: PositiveFloat = 1.0
    """Clipping."""
    clip_low: PositiveFloat = 0.2
    """Ratios below 1 - this are clipped (PPO)."""
    clip_high: PositiveFloat = 0.28
    """Ratios above 1 + this are clipped (clip-higher, DAPO)."""
    correction: Literal["none", "tis"] = "tis"
    """Of staleness and engine mismatch; ``tis``: truncated importance sampling."""
    correction_cap: PositiveFloat = 2.0
    """Cap of that ratio."""
    micro_batch: Positive = 64
    """Sequences per forward pass; bounds memory."""
    threads: Positive = 1
    """Torch threads; more than one fights with other processes on a small machine."""
    parity_rows: Annotated[int, Field(ge=0)] = 0
    """Of a batch, computed again with the weights that sampled them, to tell how far the engines'
    log-probs are from the learner's; 0: none. Takes main memory for ⌈S/κ⌉ + 2 publish copies, and
    on the device one float32 copy for the time of it."""
    checkpoint_every_steps: Positive = 50
    """Batches stay in the store until a checkpoint contains them."""
    checkpoints_kept: Positive = 2
    """Older ones are removed."""
    restarts_max: Annotated[int, Field(ge=0)] = 5
    """Restarts without a step in between, after which the run fails."""
    step_timeout_s: PositiveFloat = 3600.0
    """A step that takes longer is a hung learner."""
    warm_start: WarmStartSection = WarmStartSection()
    """Before version 0."""


class WeightsSection(Section):
    """How versions travel."""

    chunk_bytes_min: Annotated[int, Field(ge=CHUNK_BYTES_MIN, le=CHUNK_BYTES_MAX)] = 16 * 1024
    """Smallest unit of transfer; chunks are a 400th of the payload within the bounds."""
    chunk_bytes_max: Annotated[int, Field(ge=CHUNK_BYTES_MIN, le=CHUNK_BYTES_MAX)] = 1024 * 1024
    """Largest unit of transfer."""
    skip_spans: tuple[Annotated[int, Field(ge=2)], ...] | None = None
    """Versions that merged deltas span, for peers that are behind: each span holds one more state
    in memory. By default 4 and 16, and none if a state is over 2 GiB."""
    spare_bytes: Annotated[int, Field(ge=0)] | None = None
    """Disk for deltas that no live peer needs, for those that are away and may come back. By
    default four times the newest anchor: about where a way back over merged deltas, of which most
    versions need only the last few, has become as long as the anchor."""
    encoder_threads: Annotated[int, Field(gt=0, le=64)] | None = None
    """Threads that encode a version; the bytes do not depend on it. By default all cores but one,
    4 at most: the learner wants some too."""


class MembershipSection(Section):
    """Liveness."""

    term_s: PositiveFloat = 10.0
    """A peer not heard of for this long is gone (DESIGN §5)."""
    heartbeat_s: PositiveFloat = 2.0
    """Asked of the peers; several must fit into a term."""
    degree: Annotated[int, Field(ge=2, le=64)] = DEGREE
    """Links to other peers that each should have at least in a run of more than 16; the fewer, the
    longer is the way of a version, the more, the more announcements there are (DESIGN §5)."""


class Settings(Section):
    """All settings of a coordinator."""

    run: RunSection = RunSection()
    """The run as a whole."""
    server: ServerSection = ServerSection()
    """Where the coordinator is reached."""
    model: ModelSection = ModelSection()
    """The model that is trained."""
    task: TaskSection = TaskSection()
    """What is rolled out and how it is scored."""
    held_out: HeldOutSection = HeldOutSection()
    """Measuring on items that are never trained on."""
    rollouts: RolloutsSection = RolloutsSection()
    """How many trajectories a step consumes, and how old they may be."""
    learner: LearnerSection = LearnerSection()
    """GRPO."""
    weights: WeightsSection = WeightsSection()
    """How versions travel."""
    membership: MembershipSection = MembershipSection()
    """Liveness."""

    @model_validator(mode="after")
    def _related(self) -> Self:
        rollouts, membership, weights = self.rollouts, self.membership, self.weights
        if rollouts.kappa > rollouts.staleness_budget + 1:
            raise ValueError(
                f"rollouts.publication_period {rollouts.kappa} is over staleness_budget + 1 = "
                f"{rollouts.staleness_budget + 1}, so the learner would wait for ever; lower it"
            )
        upload_bytes = UPLOAD_BYTES_PER_TOKEN * rollouts.samples_per_prompt * rollouts.tokens_max
        if upload_bytes > HTTP_BODY_BYTES_MAX // 2:
            raise ValueError(
                f"rollouts.tokens_max {rollouts.tokens_max} for {rollouts.samples_per_prompt} "
                f"samples makes uploads of {upload_bytes} bytes, over the limit of "
                f"{HTTP_BODY_BYTES_MAX // 2}; lower one of them"
            )
        batch_bytes = rollouts.prompts_per_step * rollouts.group_bytes_max
        if batch_bytes > rollouts.queue_bytes_max:
            raise ValueError(
                f"rollouts.queue_bytes_max {rollouts.queue_bytes_max} holds no whole batch of "
                f"{batch_bytes} bytes; raise it, or lower tokens_max or prompts_per_step"
            )
        if batch_bytes > BATCH_BYTES_MAX:
            raise ValueError(
                f"rollouts.prompts_per_step {rollouts.prompts_per_step} makes batches of up to "
                f"{batch_bytes} bytes; the learner takes {BATCH_BYTES_MAX} at once; lower it, "
                "or tokens_max"
            )
        if membership.term_s < 2 * membership.heartbeat_s:
            raise ValueError(
                f"membership.term_s {membership.term_s} must hold two heartbeats of "
                f"{membership.heartbeat_s} s; raise it"
            )
        if weights.chunk_bytes_min > weights.chunk_bytes_max:
            raise ValueError("weights.chunk_bytes_min is over weights.chunk_bytes_max")
        return self
