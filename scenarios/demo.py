"""The demo: one coordinator and three peers as real processes on loopback, supervised.

Whatever is killed is started again: a peer with its old identity, the coordinator on its old
folder and port. The run ends when the coordinator has taken its last step; then the summary is
shown. Ctrl-C ends all of it.

On a terminal the run is drawn in place, from what the coordinator's ``/status`` says; elsewhere the
coordinator's own lines are shown.
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import trio

from coordinator.access import JOIN_FILE, fetch_status, read_access
from coordinator.plots import PLOT_FILE
from coordinator.view import RunView
from echo2p2p.errors import ChildError, ConfigError, LinkError, RefusedError, StoreError
from echo2p2p.net.aio import AioHttpClients, open_aio
from echo2p2p.net.child import last_words_of
from echo2p2p.net.program import OK
from echo2p2p.terminal import Screen, can_draw, open_screen

PEERS: Final = ("ann", "bob", "cem")
RESTARTS_MAX: Final = 20
"""Of one process; a demo that needs more is broken."""
STOP_S: Final = 3.0
"""From SIGINT to SIGKILL when the demo ends."""
JOIN_WAIT_S: Final = 120.0
VIEW_S: Final = 0.5
"""How often the view is drawn anew; the coordinator makes a status once a second."""


@dataclass
class Demo:
    """One run of the demo.

    Args:
        folder: Of the run; an earlier one is moved aside.
        arguments: More settings for the coordinator, as on its command line.
    """

    folder: Path
    arguments: Sequence[str] = ()
    _screen: Screen = field(init=False, repr=False)

    async def run(self) -> int:
        """Run it; returns the exit code.

        Raises:
            ChildError: A process died too often.
        """
        aside = _move_aside(self.folder)
        self.folder.mkdir(parents=True)
        with open_screen(sys.stdout, live=can_draw(sys.stdout)) as self._screen:
            if aside is not None:
                self._screen.line(f"an earlier demo was moved to {aside}")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._peers)
                if self._screen.live:
                    nursery.start_soon(self._watch)
                await self._coordinator()
                nursery.cancel_scope.cancel()
            summary = json.loads((self.folder / "summary.json").read_text(encoding="utf-8"))
        print(summary_text(summary, self.folder))
        return OK

    async def _watch(self) -> None:
        """Draw what the coordinator says of itself, until cancelled."""
        notes = [f"logs, metrics and checkpoints in {self.folder}; kill what you like, Ctrl-C ends"]
        async with open_aio() as aio:
            clients = AioHttpClients(aio)
            while True:
                try:
                    access = read_access(self.folder)
                    status = await fetch_status(clients, access)
                except (ConfigError, LinkError, RefusedError):
                    pass  # it is starting, or being started again; the last view stays
                else:
                    title = f"demo  {access.url}/dashboard"
                    self._screen.show(partial(RunView, status, title, notes))
                await trio.sleep(VIEW_S)

    async def _coordinator(self) -> None:
        """Keep the coordinator up until it is done; its progress is ours."""
        port = 0
        for _ in range(RESTARTS_MAX):
            command = [
                *python_command("coordinator", "run", "--config", "@demo"),
                *("--run.folder", str(self.folder), "--server.port", str(port)),
                *self.arguments,
            ]
            log = self.folder / "coordinator.log"
            code = await run_process(command, stdout=log if self._screen.live else None, stderr=log)
            if code == 0:
                return
            if code > 0:
                raise ChildError("coordinator", f"ended with code {code}", log_tail=self._tail())
            name = signal.Signals(-code).name
            self._screen.line(f"the coordinator was killed ({name}); starting it again")
            port = int(self._join_file()["url"].rpartition(":")[2])
        raise ChildError("coordinator", f"died {RESTARTS_MAX} times", log_tail=self._tail())

    def _tail(self) -> str:
        text = (self.folder / "coordinator.log").read_text(encoding="utf-8", errors="replace")
        return last_words_of(text)

    def _join_file(self) -> dict[str, str]:
        value = json.loads((self.folder / JOIN_FILE).read_text(encoding="utf-8"))
        assert isinstance(value, dict)
        return value

    async def _peers(self) -> None:
        """Start the peers once the coordinator answers."""
        with trio.fail_after(JOIN_WAIT_S):
            while not (self.folder / JOIN_FILE).exists():  # noqa: ASYNC110 others write it
                await trio.sleep(0.05)
        join = self._join_file()
        async with trio.open_nursery() as nursery:
            for name in PEERS:
                nursery.start_soon(self._peer, name, join)

    async def _peer(self, name: str, join: dict[str, str]) -> None:
        folder = self.folder / "peers" / name
        folder.mkdir(parents=True, exist_ok=True)
        command = [
            *python_command("peer", "join", join["url"], "--token", join["token"]),
            *("--name", name, "--folder", str(folder), "--relay.host", "127.0.0.1"),
        ]
        for _ in range(RESTARTS_MAX):
            code = await run_process(
                command, stdout=folder / "peer.log", stderr=folder / "peer.log"
            )
            if code == 0:
                return
            if code < 0:
                cause = signal.Signals(-code).name
                self._screen.line(f"peer {name} was killed ({cause}); starting it again")
            else:
                self._screen.line(f"peer {name} ended with code {code}, see {folder / 'peer.log'}")
            await trio.sleep(0.5)
        raise ChildError(f"peer {name}", f"died {RESTARTS_MAX} times; see {folder / 'peer.log'}")


def python_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of ours."""
    return [sys.executable, "-P", "-m", module, *arguments]


async def run_process(command: list[str], *, stdout: Path | None = None, stderr: Path) -> int:
    """Run one process to its end; when cancelled it gets SIGINT, and SIGKILL if it lingers."""
    with stderr.open("ab") as errors:
        process = await trio.lowlevel.open_process(
            command,
            stdin=subprocess.DEVNULL,
            stdout=None if stdout is None else errors,
            stderr=errors,
            start_new_session=True,
        )
        try:
            return await process.wait()
        finally:
            if process.returncode is None:
                with trio.CancelScope(shield=True):
                    process.send_signal(signal.SIGINT)
                    with trio.move_on_after(STOP_S):
                        await process.wait()
                    if process.returncode is None:
                        process.kill()
                        await process.wait()


def _move_aside(folder: Path) -> Path | None:
    """Rename an earlier run's folder; returns its new name.

    Raises:
        StoreError: It cannot be renamed.
    """
    if not folder.exists():
        return None
    stamp = datetime.datetime.fromtimestamp(folder.stat().st_mtime, tz=datetime.UTC)
    target = folder.with_name(f"{folder.name}-{stamp:%Y%m%d-%H%M%S}")
    number = 1
    while target.exists():
        number += 1
        target = folder.with_name(f"{folder.name}-{stamp:%Y%m%d-%H%M%S}-{number}")
    try:
        os.rename(folder, target)  # noqa: PTH104 Path.rename would return a path of the same name
    except OSError as error:
        raise StoreError(f"cannot move {folder} aside: {error.strerror}") from error
    return target


def summary_text(summary: dict[str, Any], folder: Path) -> str:
    """Return the summary for a person."""
    counts, sizes = summary["trajectories"], summary["weights"]
    rejected = ", ".join(f"{n} {reason}" for reason, n in counts["rejected"].items()) or "none"
    lines = [
        "",
        f"reward   {summary['reward_version0']:.3f} before, {summary['reward_first']:.3f} in the "
        f"first ten steps, {summary['reward_last']:.3f} in the last ten of {summary['steps']}",
        f"time     {summary['wall_s']:.0f} s, learner idle "
        f"{100 * summary['learner_idle_share']:.0f} % of it",
        f"weights  {summary['versions_published']} versions; a delta is "
        f"{sizes['delta_bytes_mean'] / 1000:.0f} kB, 1/{sizes['ratio_mean']:.2f} of the model; "
        f"source sent each {sizes['source_copies']:.2f} times, "
        f"{sizes['source_bytes'] / 1e6:.1f} MB in all, "
        f"peers {sizes['peer_bytes'] / 1e6:.1f} MB",
        f"samples  {counts['issued']} issued, {counts['trained']} trained, rejected: {rejected}; "
        f"ledger {'balances' if counts['balances'] and counts['recount_agrees'] else 'BROKEN'}",
        f"age      {summary['age_steps']['mean']:.2f} steps, at most {summary['age_steps']['max']}",
    ]
    lines += [
        f"peer     {peer['name']}: {peer['accepted']} accepted, {peer['rejected']} rejected, "
        f"{peer['relayed_bytes'] / 1e6:.1f} MB relayed"
        for peer in summary["peers"]
    ]
    kept = f"summary in {folder / 'summary.json'}, model in {folder / 'trained'}"
    if (folder / PLOT_FILE).exists():
        kept += f", reward plot in {folder / PLOT_FILE}"
    lines += ["", kept]
    return "\n".join(lines)
