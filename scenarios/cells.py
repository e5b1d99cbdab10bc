"""A table that takes hours, one cell at a time: each is kept in a file, and never measured twice.

Whoever starts the same command again goes on where it ended. Cells that were measured under other
conditions (settings, machine, versions) are refused, not mixed in.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from echo2p2p.errors import ConfigError
from echo2p2p.net.disk_errors import guard_disk


class Cells:
    """What has been measured so far.

    Args:
        folder: Where the files are; made if it is not there.
        conditions: Under which all cells must have been measured; plain data.
        count: Of all cells, for those who watch.

    Raises:
        ConfigError: The folder cannot be made.
    """

    def __init__(self, folder: Path, conditions: Mapping[str, Any], count: int) -> None:
        self._folder = folder
        self._conditions: dict[str, Any] = json.loads(json.dumps(conditions))
        self._count = count
        self._done = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError("--folder", f"cannot make {folder}: {error.strerror}") from error

    async def get(
        self,
        name: str,
        measure: Callable[[], Awaitable[dict[str, Any]]],
        line: Callable[[Mapping[str, Any]], str],
    ) -> dict[str, Any]:
        """Return a cell as it was kept, or measure it; says so on standard error.

        Raises:
            ConfigError: It was measured under other conditions.
            StoreError: It cannot be kept.
        """
        self._done += 1
        path = self._folder / f"{name}.json"
        found = self._read(path)
        word = "" if found is None else " (kept)"
        if found is None:
            found = await measure()
            self._keep(path, found)
        print(
            f"{self._done} of {self._count}, {name}: {line(found)}{word}",
            file=sys.stderr,
            flush=True,
        )
        return found

    def _read(self, path: Path) -> dict[str, Any] | None:
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            conditions, result = kept["conditions"], kept["result"]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            detail = f"{path} is no cell of ours ({type(error).__name__}): remove it"
            raise ConfigError("--folder", detail) from error
        for key in {**conditions, **self._conditions}:
            then, now = conditions.get(key), self._conditions.get(key)
            if then != now:
                detail = (
                    f"{path} was measured with {key} {then}, not {now}: choose another folder, or "
                    "remove this one"
                )
                raise ConfigError("--folder", detail)
        assert isinstance(result, dict)
        return result

    def _keep(self, path: Path, result: Mapping[str, Any]) -> None:
        fresh = path.with_suffix(".new")
        with guard_disk(f"write {path}"):
            with fresh.open("w", encoding="utf-8") as file:
                json.dump({"conditions": self._conditions, "result": result}, file, indent=2)
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(path)
