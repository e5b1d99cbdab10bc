"""Defaults are valid; what is wrong is refused with the path of its key."""

from pathlib import Path

import pytest

from coordinator.config import Settings
from echo2p2p.cli import load_settings
from echo2p2p.errors import ConfigError


def load(*argv: str) -> Settings:
    return load_settings(Settings, argv, program="echo2-coordinator run", presets={})


def path_of(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*argv)
    return caught.value.path


def test_the_defaults_are_valid_and_derive_the_rest() -> None:
    settings = load()
    assert settings == Settings()
    assert settings.rollouts.batch == 32 * 8
    assert (settings.rollouts.staleness_budget, settings.rollouts.kappa) == (3, 2)
    assert settings.membership.term_s >= 2 * settings.membership.heartbeat_s


def test_the_command_line_goes_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[rollouts]\nstaleness_budget = 6\ntokens_max = 9\n[run]\nsteps = 5\n")
    settings = load("--config", str(file), "--rollouts.staleness_budget", "4")
    assert (settings.rollouts.staleness_budget, settings.rollouts.tokens_max) == (4, 9)
    assert settings.rollouts.kappa == 3
    assert settings.run.steps == 5


def test_a_period_that_is_given_is_used() -> None:
    assert load("--rollouts.publication_period", "4").rollouts.kappa == 4


@pytest.mark.parametrize(
    ("argv", "path"),
    [
        (["--rollouts.publication_period", "5"], "rollouts.publication_period"),
        (
            ["--rollouts.staleness_budget", "0", "--rollouts.publication_period", "2"],
            "rollouts.publication_period",
        ),
        (["--membership.term_s", "3.9"], "membership.term_s"),
        (["--membership.heartbeat_s", "5.1"], "membership.term_s"),
        (
            ["--weights.chunk_bytes_min", "8192", "--weights.chunk_bytes_max", "4096"],
            "weights.chunk_bytes_min",
        ),
        (
            ["--rollouts.samples_per_prompt", "64", "--rollouts.tokens_max", "65537"],
            "rollouts.tokens_max",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused_under_the_key_to_change(
    argv: list[str], path: str
) -> None:
    assert path_of(*argv) == path


def test_the_relations_hold_up_to_their_edge() -> None:
    load("--rollouts.publication_period", "4", "--rollouts.staleness_budget", "3")
    load("--rollouts.publication_period", "1", "--rollouts.staleness_budget", "0")
    load("--membership.term_s", "4.0")
    load("--weights.chunk_bytes_min", "4096", "--weights.chunk_bytes_max", "4096")
    load("--rollouts.samples_per_prompt", "64", "--rollouts.tokens_max", "65536")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("run.steps", "0"),
        ("run.exit_grace_s", "0"),
        ("server.port", "65536"),
        ("server.port", "-1"),
        ("server.tls", "perhaps"),
        ("rollouts.prompts_per_step", "0"),
        ("rollouts.samples_per_prompt", "1"),
        ("rollouts.samples_per_prompt", "1025"),
        ("rollouts.staleness_budget", "-1"),
        ("rollouts.publication_period", "0"),
        ("rollouts.tokens_max", "0"),
        ("rollouts.tokens_max", str(2**20 + 1)),
        ("rollouts.temperature", "0"),
        ("rollouts.top_p", "0"),
        ("rollouts.top_p", "1.01"),
        ("rollouts.top_k", "-1"),
        ("rollouts.lease_timeout_s", "0"),
        ("learner.correction", "wishes"),
        ("learner.weight_decay", "-0.1"),
        ("learner.warm_start.steps", "-1"),
        ("learner.checkpoints_kept", "0"),
        ("weights.chunk_bytes_max", "1"),
        ("weights.chunk_bytes_min", str(2**23)),
        ("membership.term_s", "nan"),
        ("run.steps", "many"),
    ],
)
def test_a_value_out_of_its_range_is_refused_with_its_path(key: str, value: str) -> None:
    assert path_of(f"--{key}={value}") == key


@pytest.mark.parametrize(
    ("text", "path"),
    [("[rollouts]\nstaleness = 3\n", "rollouts.staleness"), ("[rollout]\nx = 1\n", "rollout")],
)
def test_an_unknown_key_is_refused_with_its_path(tmp_path: Path, text: str, path: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    assert path_of("--config", str(file)) == path


def test_settings_are_values_and_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load().run.steps = 3
