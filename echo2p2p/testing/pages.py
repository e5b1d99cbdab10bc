"""Pages for users, read as a test needs them: fenced blocks, commands, and what is in backticks."""

from __future__ import annotations

import re
import shlex
from pathlib import Path


def blocks(page: str, language: str) -> list[str]:
    """Return the contents of a page's fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def commands(page: str) -> list[str]:
    """Return the command lines of a page's console blocks, which show nothing else."""
    lines = [line for block in blocks(page, "console") for line in block.splitlines()]
    assert all(line.startswith("$ ") for line in lines), "a console block shows commands only"
    return [line.removeprefix("$ ") for line in lines]


def words_of(command: str) -> list[str]:
    """Return a command's words, without sudo, comment, and the folder of the program."""
    words = shlex.split(command, comments=True)
    if words[0] == "sudo":
        words = words[3:] if words[1] == "-u" else words[1:]
    return [Path(words[0]).name, *words[1:]]


def quoted(page: str) -> list[str]:
    """Return what stands in backticks outside of fenced blocks."""
    prose = re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`\n]+)`", prose)
