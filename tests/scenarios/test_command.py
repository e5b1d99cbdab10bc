"""The command line itself: what is there, and that a command imports no more than it needs."""

import subprocess
import sys

import pytest

from scenarios.command import BENCHES, CLAIMS, COMMANDS, main

EVERY = [
    *([name] for name in COMMANDS),
    *(["bench", name] for name in BENCHES),
    *(["reproduce", name] for name in CLAIMS),
]


def shown(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        main([*words, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("words", EVERY, ids=" ".join)
def test_every_command_shows_its_options(words, capsys):
    text = shown(capsys, *words)
    assert f"echo2-scenario {' '.join(words)}" in text
    if words[0] in {"bench", "reproduce", "run", "swarm", "compare", "agree", "soak", "torture"}:
        assert "--json" in text


def test_the_help_names_every_command(capsys):
    assert all(name in shown(capsys) for name in COMMANDS)
    assert all(name in shown(capsys, "bench") for name in BENCHES)
    assert all(name in shown(capsys, "reproduce") for name in CLAIMS)


@pytest.mark.parametrize(
    "words", [["run", "steady", "--wrong"], ["list", "more"], ["bench", "costs", "--wrong"]]
)
def test_a_word_that_nobody_knows_is_an_error_of_usage(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert f"unrecognized arguments: {words[-1]}" in capsys.readouterr().err


def test_a_command_imports_only_its_own_module():
    code = """if True:
        import sys
        from scenarios.command import main
        main(["new", sys.argv[1]])
        print(sorted(name for name in sys.modules if name.startswith("scenarios.")))
    """
    words = [sys.executable, "-c", code, "/nowhere/at/all"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['scenarios.command', 'scenarios.new_command']"
