"""How the three commands begin and end, as processes."""

import os
import subprocess
import sys

import pytest

from echo2p2p.entry import UNREAD


def run_unread(*words):
    """Run a command whose output nobody reads; return its exit code and its words on stderr."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as unread:
        command = [sys.executable, "-m", *words]
        env = {**os.environ, "PYTHONUNBUFFERED": ""}
        done = subprocess.run(command, stdout=unread, stderr=subprocess.PIPE, env=env, check=False)
    return done.returncode, done.stderr


def test_output_that_was_closed_before_is_no_error():
    command = [sys.executable, "-m", "scenarios", "list"]
    closing = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    done = subprocess.run(closing, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    "words",
    [
        ["scenarios", "list"],
        ["scenarios", "run", "live/steady", "--until", "2", "--json"],
        ["scenarios", "swarm", "--seeds", "1", "--story", "live/steady"],
        ["coordinator", "check"],
        ["peer", "--help"],
        ["scenarios", "--help"],
    ],
)
def test_output_that_nobody_reads_is_no_error(words):
    assert run_unread(*words) == (UNREAD, b"")
