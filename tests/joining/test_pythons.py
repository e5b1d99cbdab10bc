"""A peer that only relays, installed without torch on the other Pythons, joins a run over TLS."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from echo2p2p.testing.live import start_coordinator, start_peer
from echo2p2p.testing.processes import Processes

ROOT = Path(__file__).parents[2]
HOMES = (Path.home() / ".pyenv" / "versions", Path.home() / ".local" / "share" / "uv" / "python")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def find_python(minor: str) -> str:
    """Return an interpreter of this version, or skip."""
    found = [shutil.which(f"python{minor}")]
    found += [str(path) for home in HOMES for path in sorted(home.glob(f"*{minor}*/bin/python3"))]
    for python in filter(None, found):
        says = subprocess.run(
            [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
            capture_output=True,
            text=True,
            check=False,
        )
        if says.stdout.strip() == minor:
            return python
    pytest.skip(f"no Python {minor} on this machine")


def make_environment(python: str, folder: Path) -> Path:
    """Install what a relay-only peer needs; return the interpreter."""
    subprocess.run([python, "-m", "venv", "--without-pip", str(folder)], check=True)
    inside = folder / "bin" / "python"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    words = ("-m", "pip", "--python", str(inside), "-q", "--disable-pip-version-check", "install")
    done = subprocess.run(
        [
            *(sys.executable, *words, "--only-binary", ":all:"),
            *("-c", str(ROOT / "constraints.txt"), *project["dependencies"]),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        why = re.findall(r"^ERROR: (.*)$", done.stderr, re.MULTILINE) or [done.stderr[-300:]]
        pytest.skip(f"the dependencies cannot be installed here: {why[0]}")
    return inside


@pytest.mark.parametrize("minor", ["3.12", "3.13"])
def test_a_relay_only_peer_joins_from_another_python(tmp_path, minor):
    inside = make_environment(find_python(minor), tmp_path / "environment")
    with Processes(tmp_path) as processes:
        run = start_coordinator(processes, "--server.tls", "on", "--run.steps", "8")
        worker = start_peer(processes, run.url, run.token, name="worker")
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        relay = subprocess.Popen(
            [
                *(str(inside), "-W", "error", "-P", "-m", "peer", "join", run.url),
                *("--token", run.token, "--name", "relay", "--folder", "relay"),
                *("--relay.host", "127.0.0.1", "--upload-limit", "2MB"),
            ],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            text, _ = relay.communicate(timeout=60)
        finally:
            relay.kill()
        assert relay.returncode == 0, text
        assert "the run has finished" in text
        assert "Traceback" not in text
        assert "Warning" not in text
        assert text.count("link.opened") == 2, "to the source and to the other peer"
        assert (run.ended(), worker.ended()) == (0, 0)
