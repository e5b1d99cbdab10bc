"""The wheel that users install: what is in it, and whose the four names are once it is installed.

`peer`, `coordinator` and `scenarios` are plain names in site-packages: a namesake from elsewhere
would overwrite ours, so we look at a fresh environment. No network is used.
"""

import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("echo2p2p", "peer", "coordinator", "scenarios")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LOOK = """
import importlib.metadata, importlib.util, json, pathlib
from importlib import resources
scripts = importlib.metadata.entry_points(group="console_scripts")
print(json.dumps({
    "owners": importlib.metadata.packages_distributions(),
    "homes": {n: str(pathlib.Path(importlib.util.find_spec(n).origin).resolve()) for n in NAMES},
    "tests": importlib.util.find_spec("tests") is None,
    "scripts": {script.name: script.value for script in scripts},
    "version": importlib.metadata.version("echo2p2p"),
    "presets": sorted(each.name for each in resources.files("coordinator.presets").iterdir()),
}))
"""


def run(*words, cwd):
    """Run a command without the checkout on the path and without what the user has set."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    ended = subprocess.run(
        [*map(str, words)],
        cwd=cwd,
        env={**kept, "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-3000:]
    return ended.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    run(
        *(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT),
        cwd=folder,
    )
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def names(wheel):
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
        return set(archive.namelist())


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """What a fresh environment says that holds our wheel and nothing else, not even pip."""
    folder = tmp_path_factory.mktemp("fresh")
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    run(
        *(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", wheel),
        cwd=folder,
    )
    code = f"NAMES = {PACKAGES!r}\n{LOOK}"
    return json.loads(run(python, "-P", "-c", code, cwd=folder)), folder


def test_it_holds_the_four_packages_and_nothing_else(names):
    info = f"echo2p2p-{PROJECT['version']}.dist-info"
    assert {name.split("/")[0] for name in names} == {*PACKAGES, info}
    assert f"{info}/licenses/LICENSE" in names


def test_it_holds_every_module_of_the_checkout(names):
    modules = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
    }
    assert {name for name in names if name.endswith(".py")} == modules


def test_it_ships_the_type_marker_and_the_presets(names):
    assert "echo2p2p/py.typed" in names
    presets = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "coordinator" / "presets").glob("*.toml")
    }
    assert presets
    assert presets <= names


def test_it_ships_what_the_dashboard_is_made_of(names):
    page = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "coordinator" / "dashboard").iterdir()
        if path.suffix in {".html", ".css", ".js"}
    }
    assert len(page) == 4
    assert page <= names


def test_it_ships_no_tests_caches_or_documents(names):
    unwanted = re.compile(r"(^|/)(tests|conftest|__pycache__|\.\w+)(/|$)|\.(pyc|md)$")
    assert not [name for name in names if unwanted.search(name)]


def test_each_package_belongs_to_this_distribution_alone(installed):
    seen, _ = installed
    assert {name: seen["owners"][name] for name in PACKAGES} == {
        name: ["echo2p2p"] for name in PACKAGES
    }


def test_the_packages_are_the_installed_ones_and_not_the_checkouts(installed):
    seen, folder = installed
    assert all(Path(home).is_relative_to(folder.resolve()) for home in seen["homes"].values())


def test_the_tests_are_not_importable(installed):
    seen, _ = installed
    assert seen["tests"]
    assert "tests" not in seen["owners"]


def test_the_console_scripts_are_there(installed):
    seen, folder = installed
    wanted = {"echo2-coordinator", "echo2-peer", "echo2-scenario"}
    assert set(seen["scripts"]) == wanted
    assert seen["scripts"] == PROJECT["scripts"]
    assert wanted <= {path.name for path in (folder / "venv" / "bin").iterdir()}


def test_the_version_and_the_presets_arrive(installed):
    seen, _ = installed
    assert seen["version"] == PROJECT["version"]
    assert "demo.toml" in seen["presets"]
