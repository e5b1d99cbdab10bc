"""What an import brings along: seen from a fresh interpreter, because this one has imported it all.

import-linter reads the same rules from the source; this test sees what really happens.
"""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("echo2p2p", "peer", "coordinator", "scenarios")
HEAVY = {"torch", "transformers", "vllm", "tokenizers", "safetensors"}
FOR_WATCHING = {"rich", "matplotlib", "prometheus_client", "tensorboard", "tensorboardX"}
"""Imported when somebody watches, and not before."""
TORCH_LIVES_IN = ("coordinator/learner/", "peer/engine/")

REPORT = """
import json, sys, threading
{before}
for name in {names!r}:
    __import__(name)
loaded = sorted({{name.partition(".")[0] for name in sys.modules}})
print(json.dumps([loaded, [thread.name for thread in threading.enumerate()]]))
"""


def modules_of(folder):
    """Return the dotted names of all modules in a package's folder."""
    names = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


def imported(names, before=""):
    """Import ``names`` in a fresh interpreter; return top-level modules and threads after that."""
    code = REPORT.format(names=list(names), before=before)
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=110, check=False
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    loaded, threads = json.loads(ended.stdout)
    return set(loaded), threads


def imports_of(path):
    """Yield the top-level names that a file imports anywhere."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


def importers(*names):
    return {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if set(names) & set(imports_of(path))
    }


@pytest.mark.slow
def test_library_apps_and_scenarios_leave_torch_alone_and_start_no_thread():
    names = ["peer.app", "coordinator.app", "peer.command", "coordinator.command"]
    names += modules_of("echo2p2p") + modules_of("scenarios")
    assert "echo2p2p.net.aio.server" in names
    loaded, threads = imported(names)
    assert {"trio", "aiohttp"} <= loaded
    assert not loaded & {"torch", "transformers", "vllm"}
    assert not loaded & FOR_WATCHING - {"rich"}, "rich: structlog takes it where it is installed"
    assert threads == ["MainThread"]


@pytest.mark.slow
def test_a_relay_only_peer_needs_nothing_of_the_models_world():
    unwanted = sorted(HEAVY | {"jinja2"} | FOR_WATCHING)
    blocked = f"sys.modules.update(dict.fromkeys({unwanted!r}))"
    names = ["peer.app", "peer.machine", "peer.command"]
    loaded, threads = imported(names, before=blocked)
    assert "trio" in loaded
    assert threads == ["MainThread"]


@pytest.mark.slow
def test_cores_load_no_event_loop_no_log_and_no_database():
    names = []
    for core in ("wire", "weights", "broadcast", "capacity", "rollouts", "tasks"):
        names += modules_of(f"echo2p2p/{core}")
    loaded, _ = imported(names)
    assert "msgspec" in loaded
    assert not loaded & {"trio", "asyncio", "aiohttp", "structlog", "sqlite3", "pydantic"}


def test_only_the_aio_package_imports_asyncio_and_aiohttp():
    names = importers("asyncio", "aiohttp", "yarl")
    assert names
    assert all(name.startswith("echo2p2p/net/aio/") for name in names), names


def test_only_learner_and_engine_import_torch():
    names = importers(*HEAVY - {"tokenizers", "safetensors"})
    assert names
    assert all(name.startswith(TORCH_LIVES_IN) for name in names), names


def test_only_views_import_what_is_for_watching():
    assert importers("matplotlib") == {"coordinator/plots.py", "scenarios/pictures.py"}
    assert importers("rich") == {
        *("echo2p2p/terminal.py", "coordinator/view.py", "coordinator/status_command.py")
    }
    assert importers("prometheus_client") == {"coordinator/metrics.py", "peer/metrics.py"}


def test_nothing_is_pickled():
    assert not importers("pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve")
