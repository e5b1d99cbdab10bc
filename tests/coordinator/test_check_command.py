"""check: the settings as a run would use them, or one line and exit code 2."""

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from coordinator.check_command import settings_toml
from coordinator.command import PRESETS, main
from coordinator.config import Settings


def checked(capsys, *words):
    code = main(["check", *words])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_output_is_a_configuration_that_means_the_same(capsys, tmp_path):
    code, out, err = checked(capsys, "--config", "@demo", "--run.steps", "7")
    assert (code, err) == (0, "")
    again = tmp_path / "again.toml"
    again.write_text(out, encoding="utf-8")
    assert checked(capsys, "--config", str(again)) == (0, out, "")
    settings = Settings.model_validate(tomllib.loads(out))
    assert settings.run.steps == 7
    assert settings.learner.warm_start.steps == 100


def test_every_setting_is_there_and_what_follows_from_others_is_filled_in(capsys):
    _, out, _ = checked(capsys)
    told = tomllib.loads(out)
    assert told["rollouts"]["publication_period"] == 2
    assert told["server"]["tls"] == "off"
    assert "# public_url is not set" in out
    for section, model in Settings.model_fields.items():
        for key in model.annotation.model_fields:
            assert key in told[section] or f"# {key} is not set" in out
    _, out, _ = checked(capsys, "--server.host", "0.0.0.0")
    assert tomllib.loads(out)["server"]["tls"] == "on"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--config", "nowhere.toml"], "config: cannot read nowhere.toml"),
        (["--config", "@none"], "no preset '@none'"),
        (["--run.steps", "0"], "run.steps: "),
        (["--rollouts.publication_period", "9"], "rollouts.publication_period: "),
        (["--task.name", "chess"], "task.name: no task 'chess'"),
        (["--model.path", "@huge"], "model.path: no built-in model '@huge'"),
        (["--model.path", "no/such/folder"], "model.path: no/such/folder has no config.json"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_code_2(capsys, words, line):
    code, out, err = checked(capsys, *words)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert line in err
    assert err.count("\n") == 1


def test_checking_writes_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert checked(capsys, "--config", "@demo")[0] == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("preset", sorted(PRESETS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_preset_is_good(capsys, preset):
    assert checked(capsys, "--config", f"@{preset.stem}")[0] == 0


class Inner(BaseModel):
    table: dict[str, int | float | str | bool]
    pair: tuple[float, float]


class Outer(BaseModel):
    text: str
    flag: bool
    missing: int | None
    inner: Inner


@given(
    st.text(),
    st.dictionaries(st.text(), st.integers(-(2**63), 2**63 - 1) | st.text() | st.booleans()),
    st.floats(allow_nan=False),
)
def test_any_text_and_number_is_read_back_by_a_toml_parser(text, table, number):
    inner = Inner(table=table, pair=(number, 1.0))
    settings = Outer(text=text, flag=True, missing=None, inner=inner)
    told = tomllib.loads(settings_toml(settings))
    assert told == {
        "text": text,
        "flag": True,
        "inner": {"table": inner.table, "pair": [number, 1.0]},
    }
