"""A learner or a task that cannot work ends the run: in one line, for everybody, with its code."""

import itertools
from dataclasses import replace

import pytest

from coordinator.learner.base import LearnerReady, LearnerSetup, Progress
from coordinator.task_keeper import PATIENCE_S
from coordinator.task_port import Failed
from echo2p2p.errors import ChildError, ConfigError
from echo2p2p.testing.clock import run_virtual
from scenarios import first_light
from scenarios import world as world_module
from scenarios.fake_learner import FakeLearner, LearnerFaults
from scenarios.parts import InlineTaskWorker
from scenarios.world import World, WorldSpec


def spec_of(seed: int = 5) -> WorldSpec:
    return first_light.make_world(seed).spec


class Refusing(FakeLearner):
    """Says no when it starts."""

    error: Exception

    async def start(self, setup: LearnerSetup, progress: Progress) -> LearnerReady:
        """Say so after a while, as a real one would."""
        await self._life.spend(5.0)
        raise self.error


def play(world: World) -> None:
    run_virtual(world.run, seed=5)


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("model.path", "m holds no causal language model"),
        ChildError("learner", "StoreError: checkpoint c cannot be loaded", raised="StoreError"),
        ChildError("learner", "ModuleNotFoundError: torch", raised="ModuleNotFoundError"),
    ],
)
def test_a_learner_that_will_never_come_up_ends_the_run_at_once(monkeypatch, error) -> None:
    lives = []

    class Learner(Refusing):
        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **options)
            self.error = error
            lives.append(self)

    monkeypatch.setattr(world_module, "FakeLearner", Learner)
    world = World(spec_of(), seed=5)
    with pytest.RaisesGroup(type(error), flatten_subgroups=True):
        play(world)
    assert len(lives) == 1


def test_a_learner_that_finds_no_memory_is_tried_again_with_growing_pauses(monkeypatch) -> None:
    lives = []

    class Learner(Refusing):
        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **options)
            self.error = ChildError("learner", "OutOfMemoryError", raised="OutOfMemoryError")
            lives.append(self)

    monkeypatch.setattr(world_module, "FakeLearner", Learner)
    world = World(spec_of(), seed=5)
    with pytest.RaisesGroup(ChildError, flatten_subgroups=True):
        play(world)
    assert len(lives) == 1 + spec_of().settings.learner.restarts_max
    lost = world.trace.named("learner.lost")
    assert [entry.fields["restarting"] for entry in lost] == [True] * 5 + [False]
    pauses = [after.at_s - before.at_s - 5.0 for before, after in itertools.pairwise(lost)]
    assert pauses == pytest.approx([0.2, 1.0, 3.0, 10.0, 10.0], abs=0.1)


def test_a_learner_that_starts_for_an_hour_is_waited_for_by_everybody() -> None:
    world = World(replace(spec_of(), learner_start_s=3600.0, learner_faults=()), seed=5)
    play(world)
    assert world.summary is not None
    assert world.summary["outcome"] == "finished"
    assert world.trace.named("learner.lost") == []
    first = world.trace.named("step.done")[0]
    assert first.at_s > 3600.0
    assert world.breaches == []


def test_a_learner_that_dies_in_a_late_step_goes_on_from_its_checkpoint() -> None:
    spec = spec_of()
    every = spec.settings.learner.checkpoint_every_steps
    dying = 2 * every + 1
    assert dying < spec.settings.run.steps
    world = World(replace(spec, learner_faults=(LearnerFaults(die_at_step=dying),)), seed=5)
    play(world)
    (lost,) = world.trace.named("learner.lost")
    assert "SIGKILL" in str(lost.fields["detail"])
    (back,) = world.trace.named("run.rolled_back")
    assert back.fields["step"] == 2 * every
    assert world.summary is not None
    assert world.summary["outcome"] == "finished"
    assert world.breaches == []


@pytest.mark.slow
@pytest.mark.parametrize("method", ["train", "save"])
def test_a_learner_that_hangs_is_given_up_at_its_limit_and_goes_on_from_its_checkpoint(
    method,
) -> None:
    spec = spec_of()
    every = spec.settings.learner.checkpoint_every_steps
    hang = LearnerFaults(hang_at_step=2 * every + 1)
    if method == "save":
        hang = LearnerFaults(hang_at_save=2 * every)
    learner = spec.settings.learner.model_copy(update={"step_timeout_s": 60.0})
    settings = spec.settings.model_copy(update={"learner": learner})
    world = World(replace(spec, settings=settings, learner_faults=(hang,)), seed=5)
    play(world)
    (lost,) = world.trace.named("learner.lost")
    assert lost.fields["detail"] == f"learner: did not finish {method!r} within 60.0 s"
    assert lost.at_s > 60.0
    (back,) = world.trace.named("run.rolled_back")
    assert back.fields["step"] == (every if method == "save" else 2 * every)
    assert world.summary is not None
    assert world.summary["outcome"] == "finished"
    assert world.summary["trajectories"]["balances"]
    assert world.breaches == []


def test_a_learner_that_always_dies_in_the_same_step_is_given_up() -> None:
    spec = spec_of()
    dying = spec.settings.learner.checkpoint_every_steps + 1
    faults = (LearnerFaults(die_at_step=dying),) * 20
    world = World(replace(spec, learner_faults=faults), seed=5)
    with pytest.RaisesGroup(pytest.RaisesExc(ChildError, match="SIGKILL"), flatten_subgroups=True):
        play(world)
    assert len(world.trace.named("learner.lost")) == 1 + spec.settings.learner.restarts_max
    assert {entry.fields["outcome"] for entry in world.trace.named("run.ended")} == {"failed"}


class Failing(InlineTaskWorker):
    """A task that raises in each verdict, or in each prompt."""

    place: str

    async def open(self, seeds):
        """Fail or not."""
        opened = await super().open(seeds)
        return [Failed("KeyError: 'x'")] * len(opened) if self.place == "prompt" else opened

    async def score(self, episodes):
        """Fail or not."""
        scored = await super().score(episodes)
        return [Failed("KeyError: 'x'")] * len(scored) if self.place == "verdict" else scored


@pytest.mark.parametrize("place", ["prompt", "verdict"])
def test_a_task_that_fails_on_everything_ends_the_run_and_the_peers_hear_of_it(
    monkeypatch, place
) -> None:
    class Worker(Failing):
        pass

    Worker.place = place
    monkeypatch.setattr(world_module, "InlineTaskWorker", Worker)
    world = World(spec_of(), seed=5)
    with pytest.RaisesGroup(
        pytest.RaisesExc(ChildError, match="its task's code has given no .*KeyError: 'x'"),
        flatten_subgroups=True,
    ):
        play(world)
    ended = world.trace.named("run.ended")
    assert {entry.fields["outcome"] for entry in ended} == {"failed"}
    assert {entry.fields["node"] for entry in ended} == {
        "coordinator",
        *(peer.name for peer in spec_of().peers),
    }
    assert PATIENCE_S < ended[0].at_s < 3 * PATIENCE_S
