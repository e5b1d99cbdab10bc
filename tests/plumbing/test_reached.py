"""Addresses, ports, families, proxies: whole runs over real sockets, and clear errors."""

import socket
import ssl

import pytest

from echo2p2p.testing.live import begin_coordinator, start_coordinator, start_peer
from echo2p2p.testing.processes import Processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

DEAD_PROXIES = {
    name: "http://127.0.0.1:9"
    for lower in ("http_proxy", "https_proxy", "all_proxy")
    for name in (lower, lower.upper())
}


@pytest.fixture
def processes(tmp_path):
    with Processes(tmp_path) as all_of_them:
        yield all_of_them


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def play(run, peers) -> None:
    """Let a run of a few steps end well for all."""
    assert run.ended(30) == 0, run.text()
    for peer in peers:
        assert peer.ended() == 0, peer.text()
        assert "Traceback" not in peer.text()
    assert "Traceback" not in run.text()


def linked(peer) -> set[str]:
    return {entry["peer"] for entry in peer.events("link.opened")}


def test_ipv6_with_tls_works_from_end_to_end_though_proxies_are_set(processes):
    run = start_coordinator(
        processes,
        *("--server.host", "::1", "--server.tls", "on", "--run.steps", "12"),
        environment=DEAD_PROXIES,
    )
    assert run.url == f"https://[::1]:{run.port}"
    peers = [
        start_peer(
            processes,
            *(run.url, run.token, "--relay.host", "::1"),
            name=name,
            environment=DEAD_PROXIES,
        )
        for name in ("ann", "bob")
    ]
    play(run, peers)
    assert all({"source"} < linked(peer) for peer in peers), (
        "linked to the source and to each other"
    )
    assert all(entry["relay"].startswith("::1 port ") for entry in peers[0].events("peer.joined"))
    assert not peers[0].events("chunks.over_http")


def refuses_without_certificate(port: int) -> bool:
    """Ask a relay port for TLS and show nothing; return whether it ends that after its own part."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with (
        socket.create_connection(("127.0.0.1", port), timeout=5) as plain,
        context.wrap_socket(plain) as stream,
    ):
        assert stream.version() == "TLSv1.3"
        try:
            return stream.recv(1) == b""
        except (ssl.SSLError, ConnectionResetError):
            return True


def test_with_tls_the_relays_of_both_programs_refuse_who_shows_no_certificate(processes):
    port, peer_port = free_port(), free_port()
    run = start_coordinator(
        processes,
        *("--server.tls", "on", "--server.relay_port", str(port), "--run.steps", "12"),
    )
    assert refuses_without_certificate(port)
    peer = start_peer(processes, run.url, run.token, "--relay.port", str(peer_port))
    processes.wait(lambda: "source" in linked(peer), 20, "the link to the source")
    assert refuses_without_certificate(peer_port)
    play(run, [peer])
    for end in (run, peer):
        details = [entry["detail"] for entry in end.events("link.refused")]
        assert details == ["no TLS handshake: peer did not return a certificate"]
    assert not peer.events("chunks.over_http")


@pytest.mark.parametrize("ahead_s", [3600, -3600])
def test_a_clock_that_is_wrong_by_an_hour_does_no_harm(processes, ahead_s):
    run = start_coordinator(
        processes,
        *("--server.tls", "on", "--run.steps", "5", "--fake-clock-ahead-s", str(ahead_s)),
    )
    peer = start_peer(
        processes,
        *(run.url, run.token, "--data-cap-per-day", "100MB"),
        *("--fake-clock-ahead-s", str(-ahead_s)),
    )
    play(run, [peer])
    assert not run.events("peer.evicted")


def test_peers_use_the_public_names_where_they_differ_from_what_is_bound(processes):
    port = free_port()
    run = start_coordinator(
        processes,
        *("--server.tls", "on", "--server.port", str(port), "--run.steps", "5"),
        *("--server.public_url", f"https://localhost:{port}"),
    )
    assert run.url == f"https://localhost:{port}"
    peer = start_peer(processes, run.url, run.token)
    play(run, [peer])
    assert "source" in linked(peer), "localhost is where the relay is, too"
    assert not peer.events("dial.retried")


def test_the_relay_may_have_a_public_name_of_its_own(processes):
    run = start_coordinator(
        processes, "--server.relay_public_host", "127.0.0.2", "--run.steps", "5"
    )
    peer = start_peer(processes, run.url, run.token, "--stall_timeout_s", "0.3")
    play(run, [peer])
    failed = {entry["detail"] for entry in peer.events("dial.retried")}
    assert any(detail.startswith("connecting to 127.0.0.2:") for detail in failed)
    assert peer.events("chunks.over_http"), "the last resort"


def test_port_0_takes_free_ones_and_tells_the_real_ones(processes):
    run = start_coordinator(processes, "--server.port", "0", "--server.relay_port", "0")
    with socket.create_connection(("127.0.0.1", run.port), timeout=5):
        pass
    peer = start_peer(processes, run.url, run.token, "--relay.port", "0")
    processes.wait(lambda: bool(peer.events("peer.joined")), 20, "the join")
    host, _, port = peer.events("peer.joined")[0]["relay"].partition(" port ")
    with socket.create_connection((host, int(port)), timeout=5):
        pass


@pytest.mark.parametrize("setting", ["--server.port", "--server.relay_port"])
def test_a_coordinators_port_that_is_taken_is_named(processes, setting):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        run = begin_coordinator(processes, setting, str(port))
        assert run.ended() == 2, run.text()
    assert len(run.errors()) == 1
    assert (
        f"cannot listen on 127.0.0.1{' port ' if setting == '--server.port' else ':'}{port}"
        in (run.errors()[0])
    )
    assert "choose another port" in run.errors()[0]
    assert "Traceback" not in run.text()


def test_a_peers_port_that_is_taken_is_named(processes):
    run = start_coordinator(processes)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        peer = start_peer(processes, run.url, run.token, "--relay.port", str(port))
        assert peer.ended() == 2, peer.text()
    assert peer.errors() == [
        f"error: relay.listen: cannot listen on 127.0.0.1:{port}: address already in use; choose "
        "another port, or stop the process that has it"
    ]


def test_a_coordinator_that_could_not_tell_peers_its_address_does_not_start(processes):
    run = begin_coordinator(processes, "--server.host", "0.0.0.0")
    assert run.ended() == 2, run.text()
    assert run.errors() == [
        "error: server.public_url: needed with server.host 0.0.0.0: how peers reach this machine, "
        "such as https://lab.example:7070"
    ]
