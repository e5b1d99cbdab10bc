"""What is written down of each step, and a disk that refuses it."""

import json
from contextlib import suppress
from pathlib import Path

import pytest

from coordinator.recorder import EVENTS_FOLDER, METRICS_FILE, RECORD_FAILED, Recorder
from coordinator.training import StepRecord
from echo2p2p.ids import Step
from echo2p2p.testing.clock import EPOCH_S
from echo2p2p.testing.journal import TraceJournal


class Ticking:
    def __init__(self):
        self.now = EPOCH_S

    def time(self):
        self.now += 1.0
        return self.now


def record(step, reward=0.5):
    return StepRecord(
        step=Step(step),
        reward=reward,
        version_steps=(0,),
        age_mean=1.0,
        age_max=2,
        idle_s=0.0,
        train_s=1.0,
        elapsed_s=1.0,
        tokens=10,
        zero_advantage_groups=0,
        first_version_rewards=(0.0, 0),
        metrics={"loss": 0.25},
    )


async def test_each_step_is_a_line_and_an_event(tmp_path):
    recorder = Recorder(tmp_path, Ticking(), TraceJournal())
    recorder.step(record(1), None)
    recorder.step(record(2, 0.75), 1)
    recorder.close()
    lines = [json.loads(line) for line in (tmp_path / METRICS_FILE).read_text().splitlines()]
    assert [(line["step"], line["reward"], line["version"]) for line in lines] == [
        (1, 0.5, None),
        (2, 0.75, 1),
    ]
    (events,) = (tmp_path / EVENTS_FOLDER).iterdir()
    assert b"loss" in events.read_bytes()


async def test_a_rollback_begins_another_file_of_events(tmp_path):
    recorder = Recorder(tmp_path, Ticking(), TraceJournal())
    for step in (1, 2, 3, 2, 3):
        recorder.step(record(step), 0)
    recorder.close()
    assert len(list((tmp_path / EVENTS_FOLDER).iterdir())) == 2


@pytest.mark.parametrize("lost", [METRICS_FILE, EVENTS_FOLDER])
async def test_a_file_that_cannot_be_written_is_given_up_with_one_event(tmp_path, lost):
    journal = TraceJournal()
    if lost == METRICS_FILE:
        (tmp_path / lost).mkdir()
    else:
        (tmp_path / lost).write_text("in the way")
    recorder = Recorder(tmp_path, Ticking(), journal)
    for step in (1, 2, 3):
        recorder.step(record(step), 0)
    recorder.close()
    assert [(entry.name, entry.fields["file"]) for entry in journal.entries] == [
        (RECORD_FAILED, lost)
    ]
    kept = tmp_path / (EVENTS_FOLDER if lost == METRICS_FILE else METRICS_FILE)
    assert kept.exists()


async def test_a_disk_that_fills_up_in_the_middle_stops_nothing(tmp_path):
    journal = TraceJournal()
    recorder = Recorder(tmp_path, Ticking(), journal)
    recorder.step(record(1), 0)
    recorder._metrics.close()
    full_path = Path("/dev/full")
    with full_path.open("w", encoding="utf-8") as full, suppress(OSError):  # noqa: ASYNC230 a device
        recorder._metrics = full
        for step in (2, 3):
            recorder.step(record(step), 0)
        recorder.close()
    assert [entry.fields["file"] for entry in journal.named(RECORD_FAILED)] == [METRICS_FILE]
    (events,) = (tmp_path / EVENTS_FOLDER).iterdir()
    assert events.read_bytes().count(b"loss") == 3
