"""reward.png: which steps count, and that a picture comes out."""

import importlib.util
import json
import struct

import pytest

from coordinator import plots


def line(step, reward=0.5):
    figures = {"age_mean": 1.0, "age_max": 2, "idle_s": 0.5, "train_s": 1.0}
    return json.dumps({"step": step, "reward": reward, **figures})


def test_a_step_that_was_taken_again_after_a_rollback_replaces_the_lost_ones():
    lines = [line(1), line(2), line(3, 0.1), line(4, 0.1), line(3, 0.9)]
    steps = plots.surviving(lines)
    assert [(step["step"], step["reward"]) for step in steps] == [(1, 0.5), (2, 0.5), (3, 0.9)]


def test_a_torn_last_line_is_left_out():
    assert [step["step"] for step in plots.surviving([line(1), line(2)[:20]])] == [1]


def test_the_moving_mean_is_over_the_values_that_there_are():
    assert plots.moving_mean([1.0, 2.0, 3.0, 4.0], 3) == [1.0, 1.5, 2.0, 3.0]
    assert plots.moving_mean([], 3) == []


async def test_without_matplotlib_there_is_no_picture_and_no_error(tmp_path, monkeypatch):
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: None)
    assert await plots.plot(tmp_path) is None


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("matplotlib"), reason="matplotlib is missing")
async def test_a_child_draws_the_picture(tmp_path):
    text = "\n".join(line(step, step / 40) for step in range(1, 41))
    (tmp_path / plots.METRICS_FILE).write_text(text + "\n")
    assert await plots.plot(tmp_path) == tmp_path / plots.PLOT_FILE
    data = (tmp_path / plots.PLOT_FILE).read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert (width, height) == (1080, 840)
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".png"] == ["reward.png"]


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("matplotlib"), reason="matplotlib is missing")
async def test_a_child_that_fails_is_told_in_one_line(tmp_path):
    with pytest.raises(plots.PlotError, match=r"not drawn: FileNotFoundError.*metrics.jsonl"):
        await plots.plot(tmp_path)
