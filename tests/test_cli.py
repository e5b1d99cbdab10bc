"""Settings: file under command line; whatever is wrong is one line with the key's path."""

from pathlib import Path
from typing import Annotated, Literal, Self

import pytest
from pydantic import BaseModel, ConfigDict, Field, model_validator

from echo2p2p.cli import load_settings
from echo2p2p.errors import ConfigError


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Paint(Section):
    colour: Literal["red", "blue"] = "red"
    """What people see."""
    layers: Annotated[int, Field(gt=0)] = 1
    """How thick."""


class Fence(Section):
    """A fence."""

    paint: Paint = Paint()
    """Its surface."""
    name: str = "garden"
    """For people."""
    gate: str | None = None
    """If there is one."""
    heights: dict[str, int | float | str | bool] = {}
    """Of posts."""

    @model_validator(mode="after")
    def _related(self) -> Self:
        if self.paint.layers > 9 and self.gate is None:
            raise ValueError("paint.layers 10 and more need a gate; set one")
        return self


def load(*words, presets=None, values=None):
    return load_settings(Fence, words, program="fence", presets=presets or {}, values=values)


def toml(folder, text):
    path = folder / "fence.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def error_of(*words, **more):
    with pytest.raises(ConfigError) as caught:
        load(*words, **more)
    assert "\n" not in str(caught.value)
    return caught.value


def test_a_section_that_is_given_a_plain_word_is_an_error_in_a_line():
    error = error_of("--paint", "red")
    assert (error.path, error.detail.split(":")[0]) == ("paint", "is a section")


def test_nothing_given_means_the_defaults():
    assert load() == Fence()


def test_the_command_line_is_above_the_file_and_the_file_above_the_values(tmp_path):
    path = toml(tmp_path, 'name = "front"\n[paint]\ncolour = "blue"\nlayers = 2\n')
    values = {"name": "side", "gate": "iron", "paint": {"layers": 7}}
    settings = load("--config", path, "--paint.layers", "3", values=values)
    assert settings == Fence(name="front", gate="iron", paint=Paint(colour="blue", layers=3))


def test_a_section_of_the_file_keeps_the_other_keys_of_the_values(tmp_path):
    path = toml(tmp_path, '[paint]\ncolour = "blue"\n')
    settings = load("--config", path, values={"paint": {"layers": 7}})
    assert settings.paint == Paint(colour="blue", layers=7)


@pytest.mark.parametrize("form", [["--paint.layers=4"], ["--paint.layers", "4"]])
def test_a_nested_key_is_written_with_a_dot(form):
    assert load(*form).paint.layers == 4


def test_the_result_is_the_models_own_class_and_frozen():
    settings = load("--name", "x")
    assert type(settings) is Fence
    with pytest.raises(ValueError, match="frozen"):
        settings.name = "y"


def test_a_table_of_options_comes_from_the_file(tmp_path):
    path = toml(tmp_path, '[heights]\npost = 3\nrail = 1.5\nkind = "oak"\n')
    assert load("--config", path).heights == {"post": 3, "rail": 1.5, "kind": "oak"}


def test_a_preset_stands_for_a_shipped_file(tmp_path):
    path = toml(tmp_path, 'name = "shipped"\n')
    presets = {"@small": Path(path)}
    assert load("--config", "@small", presets=presets).name == "shipped"
    error = error_of("--config", "@big", presets=presets)
    assert str(error) == "config: no preset '@big'; there is: @small"


def test_the_environment_has_no_say(monkeypatch):
    monkeypatch.setenv("NAME", "from outside")
    monkeypatch.setenv("PAINT__LAYERS", "9")
    assert load() == Fence()


def test_an_unknown_key_in_the_file_is_named_with_its_path(tmp_path):
    error = error_of("--config", toml(tmp_path, "[paint]\nlayer = 3\n"))
    assert error.path == "paint.layer"
    assert "no such setting" in error.detail


def test_a_wrong_value_is_named_with_its_path(tmp_path):
    assert error_of("--paint.layers", "0").path == "paint.layers"
    assert error_of("--paint.layers", "many").path == "paint.layers"
    assert error_of("--paint.colour", "green").path == "paint.colour"
    assert error_of("--config", toml(tmp_path, "name = 7\n")).path == "name"


def test_a_relation_between_settings_that_does_not_hold_is_named_by_its_first_word():
    error = error_of("--paint.layers", "10")
    assert (error.path, error.detail) == ("paint.layers", "10 and more need a gate; set one")


def test_a_file_that_is_missing_or_no_toml_is_named(tmp_path):
    missing = tmp_path / "none.toml"
    assert "No such file" in error_of("--config", str(missing)).detail
    assert "is not TOML" in error_of("--config", toml(tmp_path, "name = ")).detail
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe4"')
    assert "is not TOML" in error_of("--config", str(tmp_path / "latin.toml")).detail


def test_help_lists_every_setting_and_ends_with_0(capsys):
    with pytest.raises(SystemExit) as caught:
        load("--help")
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    for wanted in ("fence", "A fence.", "--config FILE", "--paint.layers", "How thick."):
        assert wanted in shown


def test_an_unknown_option_ends_with_2(capsys):
    with pytest.raises(SystemExit) as caught:
        load("--nmae", "x")
    assert caught.value.code == 2
    assert "--nmae" in capsys.readouterr().err
