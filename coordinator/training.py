"""The learning loop: batches in, steps out, publications and checkpoints on their beat.

It owns the learner. A learner that dies is started again from the newest checkpoint: a new
generation begins, what only lost steps knew is rejected, and the checkpoint's weights are
published at once as the next version (DESIGN §7). Restarts without a step in between are bounded
by ``learner.restarts_max``; after that the run has failed and says why. A learner whose own code
says, while it starts, that it will never come up (no such model, a broken checkpoint, torch is not
installed) ends the run at once.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol

import msgspec
import numpy as np
import trio

from coordinator.book import Book
from coordinator.config import Settings
from coordinator.held_out import HeldOut
from coordinator.intake import Intake
from coordinator.learner.base import (
    Learner,
    LearnerSetup,
    Progress,
    TrainBatch,
    TrainSample,
    WarmStart,
)
from coordinator.publish import Publisher
from coordinator.run_state import RunState
from echo2p2p.errors import ChildError, StoreError
from echo2p2p.ids import Generation, Step
from echo2p2p.net.ports import Journal, SharedMemory, SharedState
from echo2p2p.rollouts.admission import age
from echo2p2p.rollouts.batch import GroupQueue, ScoredGroup, advantages
from echo2p2p.weights.cuts import Finder
from echo2p2p.weights.found import FoundElsewhere, room_for
from echo2p2p.wire.messages import LayoutTable

Publication = tuple[bytearray, Step, Generation, Finder | None]
"""What `Publisher.publish` takes."""

STEP_DONE: Final = "step.done"
LEARNER_READY: Final = "learner.ready"
LEARNER_LOST: Final = "learner.lost"
CHECKPOINT_SAVED: Final = "checkpoint.saved"
ROLLED_BACK: Final = "run.rolled_back"
BACK_OFF_S: Final = (0.2, 1.0, 3.0, 10.0)
"""Before the first, second, ... restart without a step in between."""
HOPELESS: Final = frozenset(
    {"StoreError", "ImportError", "ModuleNotFoundError", "LocalProtocolError"}
)
"""Exceptions in a learner's start that the next start would raise too."""


@dataclass(frozen=True)
class StepRecord:
    """One line of the metrics file."""

    step: Step
    """Steps after the update."""
    reward: float
    """Mean over the batch's rollouts."""
    version_steps: tuple[int, ...]
    """Distinct steps of the weights that generated the batch."""
    age_mean: float
    age_max: int
    idle_s: float
    """The learner waited this long for the batch."""
    train_s: float
    elapsed_s: float
    """From the wish for the batch to the end of the update."""
    tokens: int
    zero_advantage_groups: int
    first_version_rewards: tuple[float, int]
    """Sum and count of the rewards of rollouts that version 0 alone generated."""
    metrics: dict[str, float]


class Shelf(Protocol):
    """Where checkpoints are kept."""

    def folder(self, step: int) -> Path:
        """Return a free folder name for a checkpoint of this step."""
        ...

    def newest(self) -> Path | None:
        """Return the newest whole checkpoint."""
        ...

    def prune(self, keep: int) -> None:
        """Remove all but the newest ``keep``."""
        ...


class Trainer:
    """Runs the learner to the last step.

    Args:
        checkpoints: Names, finds and prunes checkpoints.
        make_learner: Called for each life of the learner.
        record: Called with each step, for metrics.
        held_out: Measures, before the first step and after the last.
        on_layout: Called once a process, when the first learner has told its layout: rebuilds
            what the store knows.
        on_rolled_back: Called with the step to which a restart has brought the run.
        on_start: Called with the progress of a learner that starts.
    """

    def __init__(
        self,
        *,
        settings: Settings,
        setup: LearnerSetup,
        make_learner: Callable[[], Learner],
        checkpoints: Shelf,
        memory: SharedMemory,
        book: Book,
        state: RunState,
        intake: Intake,
        queue: GroupQueue,
        publisher: Publisher,
        held_out: HeldOut,
        journal: Journal,
        record: Callable[[StepRecord], None],
        on_layout: Callable[[LayoutTable], Awaitable[None]],
        on_rolled_back: Callable[[Step], None],
        on_start: Progress,
    ) -> None:
        self._settings = settings
        self._setup = setup
        self._make_learner = make_learner
        self._checkpoints = checkpoints
        self._memory = memory
        self._book = book
        self._state = state
        self._intake = intake
        self._queue = queue
        self._publisher = publisher
        self._held_out = held_out
        self._journal = journal
        self._record = record
        self._on_layout = on_layout
        self._on_rolled_back = on_rolled_back
        self._on_start = on_start
        self._publishing = trio.Lock()
        self._due = False
        """A publication is due that has not begun."""
        self._training = self._stopping = False
        self._saved_step: Step | None = None
        self._export: SharedState | None = None
        self._found: SharedState | None = None
        self._copied: bytearray | None = None
        """What this learner exported last."""
        self._lives = 0
        self._started = False

    def stop(self) -> bool:
        """End the run after the step under way, with a checkpoint.

        Returns:
            False if there is no learner yet that could save one: then cancel `run`.
        """
        self._stopping = True
        self._state.notify()
        return self._training

    async def run(self) -> None:
        """Train until ``run.steps``; returns when the last checkpoint is durable.

        Raises:
            ChildError: The learner could not be kept alive.
            ConfigError: It cannot come up with these settings.
            StoreError: The disk refused.
        """
        failures = 0
        while True:
            before = self._state.step
            learner = self._make_learner()
            try:
                await self._live(learner)
            except ChildError as error:
                self._state.leasing = self._training = False
                failures = 1 if self._state.step > before else failures + 1
                hopeless = not self._started and error.raised in HOPELESS
                again = failures <= self._settings.learner.restarts_max and not hopeless
                self._journal.event(LEARNER_LOST, detail=str(error), restarting=again)
                if not again:
                    raise
                await trio.sleep(BACK_OFF_S[min(failures, len(BACK_OFF_S)) - 1])
            else:
                return
            finally:
                await learner.close()
                for state in (self._export, self._found):
                    if state is not None:
                        state.close()
                self._export = self._found = self._copied = None

    async def _live(self, learner: Learner) -> None:
        """One life of a learner, from start to the last step."""
        await self._start(learner)
        await self._held_out.before(learner, self._state.step)
        lost: ChildError | None = None
        async with trio.open_nursery() as nursery:
            self._state.leasing = True
            self._state.notify()
            try:
                self._training = True
                while self._state.step < self._settings.run.steps and not self._stopping:
                    if await self._step(learner, nursery):
                        await self._on_beat(learner, nursery)
                if self._saved_step != self._state.step:
                    await self._save(learner)  # told to stop between two checkpoints
                async with self._publishing:
                    pass  # the last weights are published even if they fell due meanwhile
                await self._publish_if_due(learner, nursery)
                self._state.leasing = False
                await self._held_out.after(learner, self._state.step)
            except ChildError as error:
                lost = error  # a publication under way still ends well
            self._state.leasing = False
        if lost is not None:
            raise lost

    async def _start(self, learner: Learner) -> None:
        self._started = False
        newest = self._checkpoints.newest()
        setup = self._setup if newest is None else _resumed(self._setup, newest)
        ready = await learner.start(setup, self._on_progress)
        self._started = True
        self._journal.event(
            LEARNER_READY, step=ready.step, parameters=ready.parameters, device=ready.device
        )
        if self._lives == 0:
            await self._on_layout(ready.layout)
        if newest is not None:
            self._saved_step = ready.step  # to save it anew would first remove it
            await self._roll_back(ready.step)
        else:
            await self._save(learner)
        self._lives += 1
        self._export = self._memory.allocate("export", max(1, ready.layout.total_bytes))
        if ready.device.startswith("cuda"):
            room = room_for(self._publisher.layout)
            self._found = self._memory.allocate("found", room)
        await self._publish(await self._exported(learner))

    def _on_progress(self, phase: str, figures: Mapping[str, float]) -> None:
        self._journal.event(f"learner.{phase}", **figures)
        self._on_start(phase, figures)

    async def _roll_back(self, step: Step) -> None:
        generation = Generation(self._state.generation + 1)
        self._state.generation = generation
        await self._book.put("generation", str(generation).encode())
        lost = await self._book.roll_back(step)
        self._state.roll_back(step)
        await self._intake.roll_back()
        self._on_rolled_back(step)
        self._journal.event(ROLLED_BACK, step=step, generation=generation, trajectories=lost)

    # --- one step -----------------------------------------------------------------------------

    async def _step(self, learner: Learner, nursery: trio.Nursery) -> bool:
        """Take one step; false if the run was told to stop before there was a batch."""
        began = trio.current_time()
        groups = await self._next_batch(learner, nursery)
        if groups is None:
            return False
        waited = trio.current_time() - began
        step = self._state.step
        batch = _batch(step, groups)
        try:
            report = await learner.train(batch)
        except ChildError:
            for scored in groups:  # still queued on disk, and so in memory
                self._queue.add(scored)
            raise
        assert report.step == step + 1, (report.step, step)
        record = _record(
            step,
            groups,
            batch,
            idle_s=waited,
            train_s=report.seconds,
            elapsed_s=trio.current_time() - began,
            metrics=dict(report.metrics),
        )
        await self._book.train(
            [(scored.group.lease_id, len(scored.group.turns)) for scored in groups],
            report.step,
            msgspec.json.encode(record),
        )
        for scored in groups:
            self._intake.decided(scored.group, None)
        self._state.step = report.step
        self._state.notify()
        self._record(record)
        self._journal.event(
            STEP_DONE,
            step=record.step,
            reward=round(record.reward, 4),
            age_max=record.age_max,
            idle_s=round(waited, 3),
        )
        return True

    async def _next_batch(
        self, learner: Learner, nursery: trio.Nursery
    ) -> list[ScoredGroup] | None:
        count = self._settings.rollouts.prompts_per_step
        while not self._stopping:
            await self._publish_if_due(learner, nursery)
            while stale := self._queue.drop_stale(self._state.step):
                await self._intake.drop(stale)  # while more may be scored that are too old
            if (groups := self._queue.take(self._state.step, count)) is not None:
                return groups
            await self._state.changed.park()
        return None

    async def _on_beat(self, learner: Learner, nursery: trio.Nursery) -> None:
        """After a step: publish every κ steps, checkpoint every so many."""
        step, settings = self._state.step, self._settings
        last = step >= settings.run.steps
        self._due = self._due or step % settings.rollouts.kappa == 0 or last
        await self._publish_if_due(learner, nursery)
        if step % settings.learner.checkpoint_every_steps == 0 or last:
            await self._save(learner)

    async def _publish_if_due(self, learner: Learner, nursery: trio.Nursery) -> None:
        """Start the publication that is due, unless one is under way.

        Then the next one spans both (DESIGN §4): it is made as soon as there is none, also while
        the learner waits for a batch, which may never come without new weights.
        """
        if self._due and not self._publishing.locked():
            self._due = False
            bits = await self._exported(learner)
            await nursery.start(self._publish, bits)

    async def _exported(self, learner: Learner) -> Publication:
        export = self._export
        assert export is not None
        done = await learner.export(export, self._found)
        before, bits = self._copied, bytearray(export.view[: self._publisher.layout.total_bytes])
        self._copied, find = bits, None
        # What changed since the last copy is of use only if that is what was published last.
        if done.found_bytes is not None and self._publisher.has_published(before):
            assert self._found is not None
            memory = np.frombuffer(self._found.view[: done.found_bytes], np.uint8)
            find = FoundElsewhere(self._publisher.layout, memory)
        return bits, done.step, self._state.generation, find

    async def _publish(
        self,
        exported: Publication,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        async with self._publishing:
            task_status.started()
            await self._publisher.publish(*exported)
        self._state.notify()

    async def _save(self, learner: Learner) -> None:
        try:
            step = await learner.save(self._checkpoints.folder(self._state.step))
        except ChildError as error:
            if error.raised != StoreError.__name__:
                raise
            # The learner lives; another one would only find the same disk.
            raise StoreError(error.detail.removeprefix(f"{error.raised}: ")) from error
        self._saved_step = step
        await self._book.checkpointed(step)
        self._checkpoints.prune(self._settings.learner.checkpoints_kept)
        self._journal.event(CHECKPOINT_SAVED, step=step)


def learner_setup(settings: Settings, model_dir: Path) -> LearnerSetup:
    """Return what a learner that begins from the model's folder needs."""
    learner, warm, rollouts = settings.learner, settings.learner.warm_start, settings.rollouts
    return LearnerSetup(
        model_dir=model_dir,
        task=settings.task.name,
        task_options=dict(settings.task.options),
        seed=settings.run.seed,
        warm_start=WarmStart(warm.steps, warm.batch, warm.learning_rate, warm.warmup_steps),
        learning_rate=learner.learning_rate,
        betas=learner.betas,
        weight_decay=learner.weight_decay,
        warmup_steps=learner.warmup_steps,
        gradient_norm_max=learner.gradient_norm_max,
        clip_low=learner.clip_low,
        clip_high=learner.clip_high,
        correction=learner.correction,
        correction_cap=learner.correction_cap,
        micro_batch=learner.micro_batch,
        threads=learner.threads,
        parity_rows=learner.parity_rows,
        parity_copies=-(-rollouts.staleness_budget // rollouts.kappa) + 2,
    )


def _resumed(setup: LearnerSetup, checkpoint: Path) -> LearnerSetup:
    return replace(setup, checkpoint=checkpoint)


def _batch(step: Step, groups: list[ScoredGroup]) -> TrainBatch:
    """Turn scored groups into rows; rows without advantage only count in the denominator."""
    rows: list[TrainSample] = []
    for scored in groups:
        values = advantages(scored.rewards, scored.mask)
        rows.extend(
            TrainSample(
                scored.group.prompt,
                turn.tokens,
                turn.logprobs,
                float(value),
                step=turn.oldest_step if turn.oldest_step == turn.newest_step else None,
            )
            for turn, value in zip(scored.group.turns, values, strict=True)
            if value != 0.0
        )
    return TrainBatch(
        step=step, samples=tuple(rows), tokens_total=sum(s.group.tokens for s in groups)
    )


def _record(
    step: Step,
    groups: list[ScoredGroup],
    batch: TrainBatch,
    *,
    idle_s: float,
    train_s: float,
    elapsed_s: float,
    metrics: dict[str, float],
) -> StepRecord:
    ages = [
        age(learner_step=step, oldest_step=turn.oldest_step)
        for scored in groups
        for turn in scored.group.turns
    ]
    rewards = np.concatenate([scored.rewards[scored.mask] for scored in groups])
    untrained = [
        reward
        for scored in groups
        if scored.group.newest_step == 0
        for reward in scored.rewards[scored.mask].tolist()
    ]
    flat = sum(not advantages(scored.rewards, scored.mask).any() for scored in groups)
    return StepRecord(
        step=Step(step + 1),
        reward=float(rewards.mean()),
        version_steps=tuple(sorted({scored.group.oldest_step for scored in groups})),
        age_mean=float(np.mean(ages)),
        age_max=max(ages),
        idle_s=idle_s,
        train_s=train_s,
        elapsed_s=elapsed_s,
        tokens=batch.tokens_total,
        zero_advantage_groups=flat,
        first_version_rewards=(float(sum(untrained)), len(untrained)),
        metrics={name: value for name, value in metrics.items() if math.isfinite(value)},
    )
