"""Every command of the user pages is understood by its program; every option, setting, route and
metric that they name exists. `test_live.py` beside this file runs the commands.
"""

import configparser
import contextlib
import io
import itertools
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import coordinator.command
import peer.command
import scenarios.command
from coordinator import fetch_command, status_command
from coordinator import metrics as run_metrics
from coordinator.config import Settings
from coordinator.fetched import MODELS
from coordinator.recorder import EVENTS_FOLDER
from echo2p2p.cli import load_settings
from echo2p2p.log import take_log_flags
from echo2p2p.testing.pages import blocks, commands, quoted, words_of
from peer.command import full_words
from peer.config import PeerSettings

ROOT = Path(__file__).parents[2]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md")
}
LANGUAGES = {"console", "toml", "ini", "yaml", "text", "python"}
LAB, VOLUNTEER = PAGES["docs/lab.md"], PAGES["docs/volunteer.md"]
BIN = Path(sys.executable).parent


COMMANDS = [(name, command) for name, page in PAGES.items() for command in commands(page)]
RUN_TOML = tomllib.loads(blocks(LAB, "toml")[0])
PEER_TOML = tomllib.loads(blocks(VOLUNTEER, "toml")[0])
UNIT = configparser.ConfigParser(interpolation=None)
UNIT.optionxform = str
UNIT.read_string(blocks(LAB, "ini")[0])
SCRAPE = dict(re.findall(r"^[ -]*(\w+): (.+)$", blocks(LAB, "yaml")[0], re.MULTILINE))
FOLDER = RUN_TOML["run"]["folder"]
URL = RUN_TOML["server"]["public_url"]


# --- what can be read without a run -------------------------------------------------------------


def said(main, *words):
    """Return what a command prints that ends well."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            code = main(list(words))
        except SystemExit as end:
            code = end.code
    assert code in {0, None}
    return out.getvalue()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return a folder with the files that the pages show, for settings to be read from."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "run.toml").write_text(blocks(LAB, "toml")[0])
    (folder / "peer.toml").write_text(blocks(VOLUNTEER, "toml")[0])
    return folder


def read_settings(kind, words, folder):
    presets = {f"@{file.stem}": file for file in coordinator.command.PRESETS.glob("*.toml")}
    words = [re.sub(r"^(?:/etc/echo2/)?(\w+\.toml)$", rf"{folder}/\1", word) for word in words]
    _, rest = take_log_flags(words)
    return load_settings(kind, rest, program="docs", presets=presets)


def check_coordinator(words, folder):
    match words:
        case ["run" | "check" | "status" | "fetch", "--help"]:
            pass
        case ["fetch", *options]:
            assert fetch_command.parse(options).model in MODELS
        case ["run" | "check", *options]:
            read_settings(Settings, options, folder)
        case ["status", *options]:
            status_command.parse(options)
        case _:
            pytest.fail(f"echo2-coordinator has no such command: {words}")


def check_peer(words, folder):
    assert words[0] == "join"
    if words[1:] == ["--help"]:
        return
    words = full_words(words)
    rest = words[1:] if words[1].startswith("-") else ["--url", *words[1:]]
    settings = read_settings(PeerSettings, rest, folder)
    assert (settings.url, settings.token) == (URL, "e2p-...")


def check_scenario(words, folder):
    del folder
    depth = 2 if words[0] in {"bench", "reproduce"} else 1
    helps = said(scenario_main, *words[:depth], "--help")
    assert not {word for word in words if word.startswith("--")} - set(options_in(helps))
    if words[0] == "run" and not words[1].endswith(".toml"):
        assert words[1] in said(scenario_main, "list").split()


def scenario_main(words):
    from scenarios.command import main

    return main(words)


def check_pip(words, folder):
    del folder
    assert words[0] == "install"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for before, word in itertools.pairwise(words):
        if before == "-c":
            assert (ROOT / word).is_file()
    known = project["optional-dependencies"]
    match = re.fullmatch(r"\.(?:\[([\w,-]+)\])?", words[-1])
    assert match, f"{words[-1]} is not this repository with extras"
    assert set((match[1] or "hf").split(",")) <= set(known)


def check_make(words, folder):
    del folder
    assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def check_systemctl(words, folder):
    del folder
    unit = re.search(r"`/etc/systemd/system/(\w+)\.service`", LAB)[1]
    assert [word for word in words if not word.startswith("-")][1:] in ([unit], [])


def check_ufw(words, folder):
    del folder
    server = RUN_TOML["server"]
    assert words[1] in {f"{server['port']}/tcp", f"{server['relay_port']}/tcp"}


def check_ssh(words, folder):
    del folder
    port = RUN_TOML["server"]["port"]
    assert words == ["-N", "-L", f"{port}:localhost:{port}", URL.split("/")[2].split(":")[0]]


def check_tensorboard(words, folder):
    del folder
    assert words == ["--logdir", f"{FOLDER}/{EVENTS_FOLDER}"]


def check_useradd(words, folder):
    del folder
    assert words[words.index("--home-dir") + 1] == str(Path(FOLDER).parent)
    assert words[-1] == UNIT["Service"]["User"]


def check_journalctl(words, folder):
    check_systemctl(["follow", words[words.index("-u") + 1]], folder)


def run_live(words, folder):
    """Nothing: `test_live.py` or `test_restore.py` runs it for real, but for making a venv."""
    assert words
    assert folder.is_dir()


CHECKS = {
    "echo2-coordinator": check_coordinator,
    "echo2-peer": check_peer,
    "echo2-scenario": check_scenario,
    "pip": check_pip,
    "make": check_make,
    "systemctl": check_systemctl,
    "journalctl": check_journalctl,
    "ufw": check_ufw,
    "ssh": check_ssh,
    "tensorboard": check_tensorboard,
    "useradd": check_useradd,
    "python3": run_live,
    "curl": run_live,
    "tar": run_live,
    "mv": run_live,
}


def test_every_fenced_block_says_what_it_is():
    for name, page in PAGES.items():
        opened = re.findall(r"^```(\w*)$", page, re.MULTILINE)[::2]
        assert set(opened) <= LANGUAGES | ({""} if name == "README.md" else set()), name


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_every_command_is_understood_by_its_program(files, page, command):
    del page
    program, *words = words_of(command)
    assert program in CHECKS, "say in this file how such a command is checked"
    CHECKS[program](words, files)


def test_a_command_with_a_wrong_option_setting_or_extra_is_found(files):
    for program, *words in (
        ["echo2-peer", "join", URL, "--token", "e2p-...", "--upload-limits", "2MB"],
        ["echo2-peer", "join", URL, "--token", "e2p-...", "--upload-limit", "2Mb"],
        ["echo2-coordinator", "check", "--rollouts.nothing", "2"],
        ["echo2-coordinator", "status", "somewhere", "--jsonl"],
        ["echo2-scenario", "run", "first-light", "--speed", "7"],
        ["pip", "install", ".[nothing]"],
        ["make", "nothing"],
    ):
        with pytest.raises((Exception, SystemExit)), contextlib.redirect_stderr(io.StringIO()):
            CHECKS[program](words, files)


def test_the_unit_starts_what_the_page_has_checked(tmp_path):
    words = shlex.split(UNIT["Service"]["ExecStart"])
    assert " ".join(["$", "echo2-coordinator", *words[1:]]) in LAB.splitlines()
    assert f"{Path(words[0]).parent}`" in LAB
    verify = shutil.which("systemd-analyze")
    if verify is None:
        return
    unit = tmp_path / "echo2.service"
    program = str(BIN / "echo2-coordinator")
    unit.write_text(blocks(LAB, "ini")[0].replace(words[0], program))
    done = subprocess.run(
        [verify, "--man=no", "verify", str(unit)], capture_output=True, text=True, check=False
    )
    assert "echo2.service" not in done.stdout + done.stderr, done.stderr


def test_the_lab_files_settings_are_checked_by_the_program(files, tmp_path):
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / "model" / name).write_text("{}")
    words = ("--config", str(files / "run.toml"), "--model.path", str(tmp_path / "model"))
    printed = tomllib.loads(said(coordinator.command.main, "check", *words))
    assert printed["server"]["tls"] == "on"
    for section, keys in RUN_TOML.items():
        for key, value in keys.items():
            assert key == "path" or printed[section][key] == value


# --- what the texts name ------------------------------------------------------------------------


def options_in(text):
    return re.findall(r"(?<![\w-])--[a-zA-Z][\w.-]*\b", text)


@pytest.fixture(scope="module")
def all_options():
    """Return every option of the programs."""
    parser = io.StringIO()
    with contextlib.redirect_stdout(parser), pytest.raises(SystemExit):
        status_command.parse(["--help"])
    texts = (
        parser.getvalue(),
        said(coordinator.command.main, "run", "--help"),
        said(coordinator.command.main, "fetch", "--help"),
        said(peer.command.main, "join", "--help"),
        said(scenarios.command.main, "agree", "--help"),
    )
    found = {option for text in texts for option in options_in(text)}
    return found | {option.replace("_", "-") for option in found if option.endswith(LIMITS)}


FILES = {".sqlite", ".jsonl", ".log"}
LIMITS = ("upload_limit", "download_limit", "data_cap_per_day")


@pytest.mark.parametrize("name", PAGES)
def test_every_option_in_the_text_exists(all_options, name):
    named = {option for words in quoted(PAGES[name]) for option in options_in(words)}
    others = {"--fate", "--folder", "--json", "--live", "--report", "--seed", "--trace"}
    assert not named - all_options - others


def exists_in(kind, dotted):
    """Say whether a dotted path is a setting of ``kind``, or one of its sections."""
    for part in dotted.split("."):
        fields = getattr(kind, "model_fields", {})
        if part not in fields:
            return kind is dict
        kind = fields[part].annotation
        kind = dict if "dict" in str(kind) else kind
    return True


@pytest.mark.parametrize("name", PAGES)
def test_every_setting_in_the_text_exists(name):
    sections = {*Settings.model_fields, *PeerSettings.model_fields} - {"token", "url", "name"}
    prefix = "|".join(sorted(sections))
    for words in quoted(PAGES[name]):
        for dotted in re.findall(rf"(?<![\w.@/-])(?:{prefix})\.[a-z_]+(?:\.[a-z_]+)?", words):
            if dotted == "relay.listen" or Path(dotted).suffix in FILES:
                continue  # what an error is about, and files
            assert exists_in(Settings, dotted) or exists_in(PeerSettings, dotted), dotted


def test_every_route_in_the_text_exists():
    sources = "".join(
        (ROOT / name).read_text() for name in ("coordinator/api.py", "peer/metrics.py")
    )
    routes = set(re.findall(r'Route\("[A-Z]+", "([^"{]+)"', sources))
    assert {"/status", "/healthz", "/control/stop"} <= routes
    for page in PAGES.values():
        everything = [*quoted(page), *commands(page)]
        named = re.findall(r"(?:^|:\d+)(/[a-z]+(?:/[a-z]+)?)$", "\n".join(everything), re.MULTILINE)
        assert not set(named) - routes
    assert SCRAPE["metrics_path"] in routes


def test_every_metric_in_the_text_exists():
    source = Path(run_metrics.__file__).read_text()
    known = {f"echo2_{name}" for name, _, _ in (*run_metrics._GAUGES, *run_metrics._COUNTERS)}
    known |= set(re.findall(r'"(echo2_\w+)"', source))
    named = {word for page in PAGES.values() for word in quoted(page) if word.startswith("echo2_")}
    assert named
    assert not named - known
