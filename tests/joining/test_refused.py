"""Whoever cannot join is told why and what to do, in one line, with the right exit code."""

import msgpack
import pytest

from echo2p2p.errors import RefusedError, RemoteProtocolError
from echo2p2p.limits import PROTOCOL
from echo2p2p.net.aio import AioHttpClients, open_aio
from echo2p2p.net.ports import Response
from echo2p2p.net.trust import JoinToken
from echo2p2p.testing.live import start_coordinator, start_peer
from echo2p2p.testing.processes import Processes
from echo2p2p.wire import codec
from echo2p2p.wire.messages import CaReply, JoinReply, Refusal
from peer.coordinator_client import checked
from scenarios.live_fakes import main

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Two runs, one with TLS and one without, which never learn: no peer stays with them."""
    with Processes(tmp_path_factory.mktemp("joining")) as processes:
        secure = start_coordinator(processes, "--server.tls", "on", name="secure")
        plain = start_coordinator(processes, "--server.tls", "off", name="plain")
        yield processes, secure, plain


def swap(url: str, scheme: str) -> str:
    return scheme + url[url.index("://") :]


def other_secret(token: str) -> str:
    """Return a token of the same run that nobody has handed out."""
    return JoinToken(b"\x01" * 16, JoinToken.parse(token).fingerprint).encode()


CASES = {
    "no token": (lambda s, p: (s.url, ""), 2, "token: none was given: add --token e2p-"),
    "cut token": (
        lambda s, p: (s.url, s.token[:-9]),
        2,
        "token: cut: 55 characters after e2p-, not 64: copy it whole",
    ),
    "mistyped token": (
        lambda s, p: (s.url, s.token[:-1] + ("a" if s.token[-1] != "a" else "b")),
        2,
        "token: mistyped: its check does not fit; copy it again",
    ),
    "the admin's token": (
        lambda s, p: (s.url, s.admin_token),
        2,
        "token: this is another secret: a join token starts with e2p-",
    ),
    "a token that the run does not know": (
        lambda s, p: (s.url, other_secret(s.token)),
        1,
        "wrong_token: the join token is not this run's; ask its owner for it",
    ),
    "token of another run, TLS": (
        lambda s, p: (s.url, p.token),
        1,
        "wrong_run: the server at this address belongs to another run than the token: check both",
    ),
    "token of another run, no TLS": (
        lambda s, p: (p.url, s.token),
        1,
        "wrong_run: the server at this address belongs to another run than the token: check both",
    ),
    "no URL": (lambda s, p: ("", s.token), 2, "url: none was given: echo2-peer join https://"),
    "no scheme": (
        lambda s, p: (f"localhost:{s.port}", s.token),
        2,
        "is no URL; write https://host:port",
    ),
    "http where TLS is on": (
        lambda s, p: (swap(s.url, "http"), s.token),
        2,
        "url: the coordinator uses TLS: write https://127.0.0.1:",
    ),
    "https where TLS is off": (
        lambda s, p: (swap(p.url, "https"), p.token),
        2,
        "url: the coordinator speaks no TLS: write http://127.0.0.1:",
    ),
}


def join_here(capsys, folder, *words: str) -> tuple[int, str, list[str]]:
    """Run the command in this process; return its exit code, its text and its error lines."""
    code = main(["join", *(word for word in words if word), "--folder", str(folder)])
    said = capsys.readouterr()
    text = said.out + said.err
    assert "Traceback" not in text
    return code, text, [line for line in said.err.splitlines() if line.startswith("error: ")]


@pytest.mark.parametrize("case", CASES)
def test_a_peer_that_is_told_the_wrong_thing_says_so_in_one_line(world, tmp_path, capsys, case):
    _, secure, plain = world
    (url, token), code, message = CASES[case][0](secure, plain), *CASES[case][1:]
    got, text, errors = join_here(capsys, tmp_path, url, *(["--token", token] if token else []))
    assert (got, len(errors)) == (code, 1), text
    assert message in errors[0]
    assert secure.token not in text
    assert "peer.joined" not in text


def test_the_process_ends_with_that_code_and_line(world):
    processes, secure, _ = world
    peer = start_peer(processes, swap(secure.url, "http"), secure.token, name="process")
    assert peer.ended() == 2
    assert peer.errors() == [
        f"error: url: the coordinator uses TLS: write {secure.url}",
    ]


def wrong_size(path) -> None:
    path.write_bytes(b"x" * 31)


def unreadable(path) -> None:
    path.mkdir()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (wrong_size, "holds 31 bytes, not 32: restore it, or move it away and join as a new peer"),
        (unreadable, "identity: cannot read"),
    ],
)
def test_an_identity_that_cannot_be_used_is_named(world, tmp_path, capsys, damage, message):
    _, _, plain = world
    damage(tmp_path / "identity")
    code, text, errors = join_here(capsys, tmp_path, plain.url, "--token", plain.token)
    assert (code, len(errors)) == (2, 1), text
    assert message in errors[0]


def test_a_folder_that_cannot_be_made_is_named(world, tmp_path, capsys):
    _, _, plain = world
    (tmp_path / "file").write_text("in the way")
    folder = tmp_path / "file" / "peer"
    code, text, errors = join_here(capsys, folder, plain.url, "--token", plain.token)
    assert (code, len(errors)) == (2, 1), text
    assert f"folder: cannot write {folder}" in errors[0]


def test_a_model_that_does_not_fit_is_refused_with_figures_before_anything_is_fetched(
    world, tmp_path, capsys
):
    processes, _, plain = world
    words = (plain.url, "--token", plain.token, "--fake-memory-bytes", "200000")
    code, text, errors = join_here(capsys, tmp_path, *words)
    assert code == 1
    assert errors == [
        "error: the model needs 0.3 MB of memory (0.1 MB for the weights, 0.2 MB for the engine), "
        "and 0.2 MB are free: free some, or only relay, with --engine.kind none (0.1 MB)"
    ]
    assert "peer.joined" in text
    assert "payload.followed" not in text
    processes.wait(lambda: bool(plain.events("peer.left")), 5, "its goodbye")
    code, _, errors = join_here(capsys, tmp_path, *words[:-1], "100000")
    assert code == 1
    assert errors[0].endswith("and 0.1 MB are free: free some, or use a larger machine")


def test_a_model_that_fits_without_an_engine_is_relayed(world):
    processes, _, plain = world
    words = ("--fake-memory-bytes", "300000", "--engine.kind", "none")
    peer = start_peer(processes, plain.url, plain.token, *words, name="small")
    processes.wait(lambda: bool(peer.events("version.applied")), 20, "the first version")
    peer.process.terminate()
    assert peer.ended() == 130


async def test_a_peer_of_another_protocol_is_told_which_release_to_install(world):
    _, _, plain = world
    foreign = {"t": "join", "protocol": PROTOCOL + 1, "name": "future", "more": 1}
    near = {"t": "join", "protocol": PROTOCOL, "name": "damaged", "more": 1}
    async with open_aio() as aio, AioHttpClients(aio).connect(plain.url, None) as http:
        answers = [
            await http.request(
                "POST",
                "/join",
                body=msgpack.packb(body),
                headers={"authorization": f"Bearer {plain.token}"},
                timeout_s=5,
            )
            for body in (foreign, near)
        ]
    said = [codec.decode(answer.body, Refusal) for answer in answers]
    assert [answer.status for answer in answers] == [400, 400]
    assert said[0].reason == "wrong_protocol"
    assert said[0].detail == (
        f"this run speaks protocol {PROTOCOL}, the peer {PROTOCOL + 1}; "
        "install the same release on both"
    )
    assert said[1].reason == "malformed"
    with pytest.raises(RefusedError, match="install the same release on both"):
        checked(answers[0], JoinReply)


def test_an_answer_of_another_release_is_explained():
    foreign = Response(200, msgpack.packb({"t": "ca", "run_public_key": b"", "more": 1}))
    with pytest.raises(RemoteProtocolError, match="install the release that the run uses"):
        checked(foreign, CaReply)
