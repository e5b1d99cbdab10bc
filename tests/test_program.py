"""How a command ends: its exit code, one line or a traceback, and what signals do."""

import os
import signal
import subprocess
import sys

import pytest
import trio

from echo2p2p.errors import ConfigError, LinkError
from echo2p2p.net.program import FAILED, INTERRUPTED, OK, USAGE, run_program


def raising(*errors, grouped=False):
    async def main():
        if not grouped:
            raise errors[0]
        async with trio.open_nursery() as nursery:
            for error in errors:

                async def fail(error=error):
                    raise error

                nursery.start_soon(fail)
        return OK

    return main


@pytest.mark.parametrize("code", [OK, FAILED, 7])
def test_the_code_of_main_is_the_programs(code):
    async def main():
        await trio.lowlevel.checkpoint()
        return code

    assert run_program(main) == code


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(
    ("error", "code"),
    [(LinkError("no way there"), FAILED), (ConfigError("a.key", "is wrong: mend it"), USAGE)],
)
def test_an_expected_error_is_one_line_and_its_code(capsys, error, code, grouped):
    assert run_program(raising(error, grouped=grouped)) == code
    assert capsys.readouterr().err == f"error: {error}\n"


def test_of_several_expected_errors_one_is_told(capsys):
    errors = LinkError("first"), LinkError("second")
    assert run_program(raising(*errors, grouped=True)) == FAILED
    assert capsys.readouterr().err in {"error: first\n", "error: second\n"}


def test_a_bug_keeps_its_traceback():
    with pytest.raises(BaseExceptionGroup) as caught:
        run_program(raising(ZeroDivisionError("a bug")))
    assert caught.group_contains(ZeroDivisionError, match="a bug")


def test_a_bug_beside_an_expected_error_is_not_hidden(capsys):
    with pytest.raises(BaseExceptionGroup) as caught:
        run_program(raising(LinkError("expected"), ZeroDivisionError("a bug"), grouped=True))
    assert caught.group_contains(ZeroDivisionError)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_cancels_lets_clean_up_run_and_gives_130(number):
    cleaned = []

    async def main():
        try:
            os.kill(os.getpid(), number)
            await trio.sleep_forever()
        finally:
            with trio.move_on_after(5, shield=True):
                await trio.lowlevel.checkpoint()
                cleaned.append(True)
        return OK

    assert run_program(main) == INTERRUPTED
    assert cleaned == [True]


def test_a_failure_while_cleaning_up_after_a_signal_is_told(capsys):
    async def main():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await trio.sleep_forever()
        finally:
            raise LinkError("while closing")

    assert run_program(main) == FAILED
    assert "while closing" in capsys.readouterr().err


def test_signals_are_as_before_afterwards():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)

    async def main():
        return OK

    run_program(main)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


STUBBORN = """
import os, signal, sys, trio
from echo2p2p.net.program import run_program

async def main():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        await trio.sleep_forever()
    finally:
        with trio.CancelScope(shield=True):
            print("cleaning", flush=True)
            os.kill(os.getpid(), signal.SIGTERM)
            await trio.sleep_forever()
    return 0

sys.exit(run_program(main))
"""


def python(*words):
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.slow
def test_a_second_signal_ends_the_process_at_once():
    ended = python("-c", STUBBORN)
    assert (ended.returncode, ended.stdout) == (INTERRUPTED, "cleaning\n")


@pytest.mark.slow
def test_python_without_assertions_is_refused():
    code = "import sys\nfrom echo2p2p.net.program import run_program\nsys.exit(run_program(None))"
    ended = python("-O", "-c", code)
    assert ended.returncode == USAGE
    assert ended.stderr == "error: run Python without -O: assertions are part of this program\n"
