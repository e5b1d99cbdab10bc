"""One machine's process in `echo2-scenario bench broadcast` that runs libtorrent (Rasterbar).

Words and answers are those of `scenarios.broadcast_node`. All processes have the torrent before the
clock starts, and nobody is connected; it starts with the first connection and ends with the last
piece hashed. Settings:

* ``default``: libtorrent's own; everybody dials everybody.
* ``tuned``: no uTP, 64 KiB pieces, three unchoked peers, short queues: the quickest that we found.
* ``super-seeding``: as tuned with BEP 16 at the source, whose clock starts with the first byte of
  payload that it sends: it waits ten seconds before that, which is no property of the idea.
"""

from __future__ import annotations

import importlib
import os
import random
import sys
import time  # noqa: TID251 - processes share no clock but the kernel's
from pathlib import Path
from typing import Any, Final

import msgspec

from echo2p2p.ids import digest_of
from scenarios.broadcast_node import Finished, Ready, Report, Role, cpu_s, say

PORT: Final = 6881
PIECE_BYTES: Final = 64 * 1024
POLL_MS: Final = 20
NAME: Final = "payload"
SETTINGS: Final = ("default", "tuned", "super-seeding")
QUIET: Final = {
    "enable_dht": False,
    "enable_lsd": False,
    "enable_upnp": False,
    "enable_natpmp": False,
}
TUNED: Final = {
    "enable_outgoing_utp": False,
    "enable_incoming_utp": False,
    "mixed_mode_algorithm": 0,
    "allow_multiple_connections_per_ip": True,
    "smooth_connects": False,
    "connection_speed": 1000,
    "torrent_connect_boost": 255,
    "unchoke_interval": 1,
    "optimistic_unchoke_interval": 2,
    "peer_turnover": 0,
    "in_enc_policy": 2,
    "out_enc_policy": 2,
    "rate_limit_ip_overhead": False,
    "connections_limit": 500,
    "tick_interval": 100,
    "max_allowed_in_request_queue": 2000,
    "request_queue_time": 3,
    "request_timeout": 10,
    "piece_timeout": 5,
    "peer_timeout": 15,
    "min_reconnect_time": 1,
    "listen_queue_size": 128,
    "peer_connect_timeout": 5,
    "enable_ip_notifier": False,
}
SHORT: Final = {
    "unchoke_slots_limit": 3,
    "max_out_request_queue": 8,
    "send_buffer_watermark": 65_536,
    "whole_pieces_threshold": 0,
}
LONG: Final = {
    "unchoke_slots_limit": -1,
    "max_out_request_queue": 500,
    "send_buffer_watermark": 524_288,
}
"""For super-seeding, which chooses by itself whom it serves."""


class TorrentPart:
    """The session of one machine.

    Args:
        role: Which one.
        folder: Of this machine's file; its parent holds the torrent.
    """

    def __init__(self, role: Role, folder: Path) -> None:
        self._lt: Any = importlib.import_module("libtorrent")
        self._role = role
        self._folder = folder
        self._first_s: float | None = None
        self._start_s = 0.0
        self._payload = random.Random(role.seed).randbytes(role.payload_bytes)  # noqa: S311

    def start(self) -> None:
        """Listen; the source makes the torrent."""
        lt, role = self._lt, self._role
        self._folder.mkdir(parents=True)
        if role.index == 0:
            (self._folder / NAME).write_bytes(self._payload)
            self._torrent_path.write_bytes(self._make_torrent())
        wanted: dict[str, Any] = dict(QUIET)
        if role.settings != "default":
            wanted |= TUNED | (LONG if role.settings == "super-seeding" else SHORT)
        wanted["listen_interfaces"] = f"{role.hosts[role.index]}:{PORT}"
        self._session = lt.session(wanted)

    def link(self) -> None:
        """Add the torrent, without peers."""
        lt, role = self._lt, self._role
        add = lt.add_torrent_params()
        add.ti = lt.torrent_info(str(self._torrent_path))
        add.save_path = str(self._folder)
        flags = lt.torrent_flags
        add.flags &= ~(flags.auto_managed | flags.paused)
        if role.index == 0:
            add.flags |= flags.seed_mode
            if role.settings == "super-seeding":
                add.flags |= flags.super_seeding
        self._torrent = self._session.add_torrent(add)
        while str(self._torrent.status().state) not in {"seeding", "downloading", "finished"}:
            self._session.wait_for_alert(POLL_MS)
            self._session.pop_alerts()

    def connect(self) -> None:
        """Dial: everybody, or, where it is tuned, those before us."""
        role = self._role
        for index, host in enumerate(role.hosts):
            both = role.settings == "default" and index != role.index
            if both or index < role.index:
                self._torrent.connect_peer((host, PORT))

    def wait_whole(self) -> None:
        """Wait for the last piece, without limit."""
        while not self._torrent.status().is_seeding:
            self._session.wait_for_alert(POLL_MS)
            self._session.pop_alerts()

    def look(self) -> None:
        """See whether the first byte of payload has left."""
        if self._first_s is None and self._torrent.status().total_payload_upload > 0:
            self._first_s = time.monotonic() - self._start_s

    def report(self, used_s: float) -> Report:
        """Return the counters, once the file on disk is compared."""
        status = self._torrent.status()
        data = (self._folder / NAME).read_bytes()
        assert digest_of(data) == digest_of(self._payload), "libtorrent: another payload"
        waits = self._role.settings == "super-seeding" and self._role.index == 0
        return Report(
            used_s,
            received_bytes=status.total_payload_download,
            duplicate_bytes=status.total_redundant_bytes,
            first_s=(self._first_s or 0.0) if waits else 0.0,
        )

    def begin(self, start_s: float) -> None:
        """Wait for the clock, and connect."""
        self._start_s = start_s
        time.sleep(max(0.0, start_s - time.monotonic()))
        self.connect()

    @property
    def _torrent_path(self) -> Path:
        return self._folder.parent / f"{NAME}.torrent"

    def _make_torrent(self) -> bytes:
        lt, role = self._lt, self._role
        files = lt.list_files(str(self._folder / NAME))
        if role.settings == "default":
            torrent = lt.create_torrent(files)
        else:
            torrent = lt.create_torrent(files, PIECE_BYTES, lt.create_torrent.v1_only)
        lt.set_piece_hashes(torrent, str(self._folder))
        encoded: bytes = lt.bencode(torrent.generate())
        return encoded


def main(text: str, folder: Path) -> None:
    """Play the role that ``text`` describes."""
    role = msgspec.json.decode(text, type=Role)
    part = TorrentPart(role, folder / role.name)
    part.start()
    say(Ready())
    before_s = 0.0
    waiting = b""
    os.set_blocking(0, False)
    while True:
        try:
            data = os.read(0, 65_536)
        except BlockingIOError:
            if before_s and role.index == 0:
                part.look()
            time.sleep(POLL_MS / 1000)
            continue
        if not data:
            return
        *lines, waiting = (waiting + data).split(b"\n")
        for line in lines:
            match line.decode().split():
                case ["link"]:
                    part.link()
                    say(Ready())
                case ["go", when]:
                    before_s = cpu_s()
                    part.begin(float(when))
                    if role.index:
                        part.wait_whole()
                    say(Finished(time.monotonic() - float(when)))
                case ["stop"]:
                    say(part.report(cpu_s() - before_s))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
