import json

import pytest
import trio

from echo2p2p.errors import ConfigError
from scenarios.cells import Cells

GIVEN = {"steps": 80, "spread": (1, 2)}


def measured(cells, name="a", found=None):
    calls = []

    async def measure():
        await trio.lowlevel.checkpoint()
        calls.append(name)
        return {"x": 1.5} if found is None else found

    result = trio.run(cells.get, name, measure, lambda cell: f"x is {cell['x']}")
    return result, calls


def test_a_cell_is_measured_once_and_told_each_time(tmp_path, capsys):
    folder = tmp_path / "deep" / "cells"
    assert measured(Cells(folder, GIVEN, 2)) == ({"x": 1.5}, ["a"])
    assert capsys.readouterr().err == "1 of 2, a: x is 1.5\n"
    again = Cells(folder, GIVEN, 2)
    assert measured(again) == ({"x": 1.5}, [])
    assert measured(again, "b", {"x": 2}) == ({"x": 2}, ["b"])
    assert capsys.readouterr().err == "1 of 2, a: x is 1.5 (kept)\n2 of 2, b: x is 2\n"


def test_cells_of_other_conditions_are_not_mixed_in(tmp_path):
    measured(Cells(tmp_path, GIVEN, 1))
    with pytest.raises(ConfigError, match="measured with steps 80, not 40"):
        measured(Cells(tmp_path, GIVEN | {"steps": 40}, 1))
    with pytest.raises(ConfigError, match="with peers None, not 3"):
        measured(Cells(tmp_path, GIVEN | {"peers": 3}, 1))


@pytest.mark.parametrize("text", ["", "[]", '{"conditions": {}}', "half of a {"])
def test_what_is_no_cell_is_refused(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ConfigError, match="no cell of ours"):
        measured(Cells(tmp_path, GIVEN, 1))


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot make"):
        Cells(tmp_path / "file" / "cells", GIVEN, 1)


def test_a_measurement_that_was_cut_off_leaves_nothing(tmp_path):
    async def measure():
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        trio.run(Cells(tmp_path, GIVEN, 1).get, "a", measure, str)
    assert list(tmp_path.iterdir()) == []
    measured(Cells(tmp_path, GIVEN, 1))
    assert json.loads((tmp_path / "a.json").read_text())["conditions"]["spread"] == [1, 2]
