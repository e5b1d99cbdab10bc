"""How a coordinator's owner reaches it: join.json in the run's folder, or a URL and a token.

``join.json`` holds the URL, both tokens and, with TLS, the certificate of the run's authority, so
that a copy of that one file is all that ``echo2-coordinator status`` needs on another machine. It
is a secret: its owner alone can read it. With a URL in its place, the join token says which
authority to believe, exactly as for a peer.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from coordinator.app import Opened
from echo2p2p.errors import ConfigError, HttpError, RefusedError, RemoteProtocolError
from echo2p2p.net.disk_errors import guard_disk
from echo2p2p.net.ports import HttpClients, Response, TlsClient
from echo2p2p.net.trust import JoinToken, authority_from
from echo2p2p.wire import codec
from echo2p2p.wire.messages import CaReply, Refusal

JOIN_FILE: Final = "join.json"
TIMEOUT_S: Final = 10.0


@dataclass(frozen=True)
class Access:
    """What a request for the status needs."""

    url: str
    admin_token: str = ""
    """Empty: none; enough on loopback."""
    token: str = ""
    """The join token, from which the authority is found if it is not known yet."""
    authority: bytes | None = None
    """Certificate of the run's authority, PEM."""


def write_access(folder: Path, opened: Opened) -> None:
    """Write ``join.json`` into a run's folder, for its owner alone.

    Raises:
        StoreError: The disk refused.
    """
    content = {
        "url": opened.url,
        "token": opened.token,
        "admin_token": opened.admin_token,
        "authority": None if opened.authority is None else opened.authority.decode("ascii"),
    }
    fresh = folder / f"{JOIN_FILE}.new"
    with guard_disk(f"write {folder / JOIN_FILE}"):
        fresh.unlink(missing_ok=True)
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(json.dumps(content, indent=2) + "\n")
        fresh.replace(folder / JOIN_FILE)


def read_access(where: Path) -> Access:
    """Read a run's folder, or a copy of its ``join.json``.

    Raises:
        ConfigError: There is none, or it is not one.
    """
    path = where / JOIN_FILE if where.is_dir() else where
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        url, token, admin = content["url"], content["token"], content["admin_token"]
        authority = content.get("authority")
    except OSError as error:
        detail = f"cannot read {path} ({error.strerror}); give a URL, a run's folder or its "
        raise ConfigError("status", detail + JOIN_FILE) from error
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError("status", f"{path} is not a run's {JOIN_FILE}") from error
    return Access(url, admin, token, authority.encode("ascii") if authority else None)


async def fetch_status(clients: HttpClients, access: Access) -> dict[str, Any]:
    """Ask for the status once.

    Raises:
        ConfigError: TLS without anything that says whom to believe.
        RefusedError: The admin token is wrong.
        HttpError: No answer, or not a coordinator's.
    """
    headers = {"authorization": f"Bearer {access.admin_token}"} if access.admin_token else {}
    tls = await _trust(clients, access)
    async with clients.connect(access.url, tls) as http:
        answer = await http.request("GET", "/status", headers=headers, timeout_s=TIMEOUT_S)
    if answer.status != 200:
        raise _refused(answer, access.url)
    try:
        status = json.loads(answer.body)
    except ValueError:
        status = None
    if not isinstance(status, dict) or "trajectories" not in status:
        raise HttpError(f"{access.url}: the answer is not a coordinator's; check the port")
    return status


async def _trust(clients: HttpClients, access: Access) -> TlsClient | None:
    if not access.url.startswith("https://"):
        return None
    if access.authority is not None:
        return TlsClient(authority=access.authority)
    if not access.token:
        detail = (
            f"{access.url} uses TLS: give the run's join token with --token, or the run's folder "
            f"or {JOIN_FILE} in place of the URL"
        )
        raise ConfigError("--token", detail)
    token = JoinToken.parse(access.token)
    async with clients.connect(access.url, TlsClient(authority=None)) as http:
        answer = await http.request("GET", "/ca", timeout_s=TIMEOUT_S)
    try:
        reply = codec.decode(answer.body, CaReply)
    except RemoteProtocolError as error:
        raise HttpError(f"{access.url}: not a coordinator; check host and port") from error
    return TlsClient(authority=authority_from(reply, token))


def _refused(answer: Response, url: str) -> RefusedError | HttpError:
    try:
        refusal = codec.decode(answer.body, Refusal)
    except RemoteProtocolError:
        return HttpError(f"{url}: HTTP status {answer.status}; is this a coordinator's URL?")
    mend = ": give it with --admin-token" if refusal.reason == "wrong_admin_token" else ""
    return RefusedError(refusal.reason, refusal.detail + mend)
