import importlib.util

import pytest

from echo2p2p.errors import ConfigError, EchoError
from scenarios import pictures
from scenarios.command import main


def test_what_cannot_be_drawn_is_said_first(tmp_path, monkeypatch):
    pictures.check_target(None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    pictures.check_target(tmp_path / "a.png")
    with pytest.raises(ConfigError, match="make it first"):
        pictures.check_target(tmp_path / "none" / "a.png")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EchoError, match=r"echo2p2p\[report\]"):
        pictures.check_target(tmp_path / "a.png")


@pytest.mark.parametrize(
    "words", [["reproduce", "overlap"], ["bench", "broadcast", "--virtual", "--peers", "2"]]
)
def test_both_commands_end_at_once_and_in_one_line(words, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert main([*words, "--plot", str(tmp_path / "none" / "a.png")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --plot: there is no folder")


def test_a_file_that_cannot_be_written_is_one_line(tmp_path):
    pytest.importorskip("matplotlib")
    figure, _ = pictures.new_figure()
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(EchoError, match=r"cannot write .*folder.png"):
        pictures.save(figure, tmp_path / "folder.png")
