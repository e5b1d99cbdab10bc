"""The broadcast benchmark in virtual time: the same relays on simulated lines, up to thousands.

A simulated line carries payload only, so it has what TCP would leave of the nominal rate. All peers
assemble into one piece of memory, which each fills with the same verified bytes: a thousand copies
would not fit; what each of them holds is still its own. CPU time is this process's, which plays all
machines and the lines between them.
"""

from __future__ import annotations

import random
import time  # noqa: TID251 - a benchmark reads its own thread's CPU clock
from dataclasses import dataclass
from typing import Final

import trio

from echo2p2p.broadcast.settings import MESH_NODES_MAX
from echo2p2p.ids import SOURCE, ManifestId, PeerId
from echo2p2p.net.ports import Endpoint
from echo2p2p.testing.clock import run_virtual
from echo2p2p.testing.network import SimNetwork
from echo2p2p.testing.relays import Payload, RelayNet, wait_whole
from echo2p2p.testing.system import MemoryState
from echo2p2p.weights.assembly import Assembly
from echo2p2p.wire.messages import ManifestHeader
from scenarios.broadcast_links import Line, bound_of, plan_lines, plan_neighbours
from scenarios.broadcast_node import PORT, a_moment, make_payload, member_name
from scenarios.broadcast_rows import Case, Outcome, Row, row_of
from scenarios.one_to_many import OneToMany, receive_whole

MS: Final = 1e-3
JOIN_AT_ONCE: Final = 32
JOIN_EVERY_S: Final = 0.5
TICK_S: Final = 1 / 1024
"""In a large run, where exact timers would cost a round of the scheduler each."""


class _SharedMemory(MemoryState):
    """One block for all peers: none of them may give it back."""

    def close(self) -> None:
        """Keep it."""


@dataclass
class _Net:
    """Everything of one broadcast."""

    network: SimNetwork
    relays: RelayNet
    payload: Payload


def measure(case: Case, systems: list[str], runs: int) -> list[Row]:
    """Return a row for each system."""
    lines = plan_lines(case.links, case.peers, case.mbit)
    bound = bound_of(case.payload_bytes, lines)
    rows = []
    for system in systems:
        play = {"echo2p2p": _relay, "one-to-many": _one_to_many}[system]
        seeds = range(case.seed, case.seed + runs)
        tick_s = TICK_S if case.peers > MESH_NODES_MAX else 0.0
        outcomes = [
            run_virtual(play, case, lines, seed, seed=seed, tick_s=tick_s) for seed in seeds
        ]
        rows.append(row_of(system, "", "virtual", case, bound, outcomes))
    return rows


def _make_network(case: Case, lines: list[Line], seed: int) -> SimNetwork:
    network = SimNetwork(random.Random(seed))  # noqa: S311 - to be repeatable
    for index, line in enumerate(lines):
        network.add_node(
            member_name(index),
            up_bytes_per_s=line.up_bytes_per_s,
            down_bytes_per_s=line.down_bytes_per_s,
            latency_s=case.rtt_ms * MS / 4 + line.rtt_ms * MS / 2,
            loss=line.loss,
        )
    return network


async def _relay(case: Case, lines: list[Line], seed: int) -> Outcome:
    network = _make_network(case, lines, seed)
    listens = {member_name(index): line.reachable for index, line in enumerate(lines)}
    memory: dict[ManifestId, _SharedMemory] = {}

    def share(key: ManifestId, header: ManifestHeader) -> tuple[Assembly, MemoryState]:
        if key not in memory:
            memory[key] = _SharedMemory(header.payload_bytes)
        return Assembly(header, memory[key].view), memory[key]

    async with trio.open_nursery() as nursery:
        nursery.start_soon(network.run)
        relays = RelayNet(
            nursery,
            network.streams,
            listen=lambda name: Endpoint(name, 0) if listens[name] else None,
            seed=seed,
        )
        names = [member_name(index) for index in range(len(lines))]
        for name in names:
            await relays.start(name, begin=share)
        payload = make_payload(relays, case.payload_bytes)
        ids = [relays.peer_id(name) for name in names[1:]]
        overlay: dict[PeerId, tuple[PeerId, ...]] = plan_neighbours(ids, lines, seed)
        links = (sum(map(len, overlay.values())) + len(overlay[SOURCE])) // 2
        for first in range(0, len(names), JOIN_AT_ONCE):
            # A source shakes hands with so many at once; more would come back later.
            relays.link_up(overlay, names[first : first + JOIN_AT_ONCE])
            await trio.sleep(JOIN_EVERY_S)
        await relays.wait_linked(links)
        outcome = await _clocked(case, _Net(network, relays, payload))
        nursery.cancel_scope.cancel()
    return outcome


async def _clocked(case: Case, net: _Net) -> Outcome:
    network, relays, payload = net.network, net.relays, net.payload
    names = list(relays.members)
    before = {name: network.traffic(name) for name in names}
    cpu_s, start_s = time.thread_time(), trio.current_time()
    finished: dict[str, float] = {}

    async def wait(name: str) -> None:
        node = relays.members[name].node
        while node.assembly(payload.manifest_id) is None:
            await a_moment()
        await wait_whole(node, payload.manifest_id)
        finished[name] = trio.current_time() - start_s

    async with trio.open_nursery() as nursery:
        relays.source.node.publish(payload.signed, payload.assembly, push=True)
        for name in names[1:]:
            nursery.start_soon(wait, name)
    cpu_s = time.thread_time() - cpu_s
    after = {name: network.traffic(name) for name in names}
    ups = tuple(after[name].sent_bytes - before[name].sent_bytes for name in names)
    downs = tuple(after[name].received_bytes - before[name].received_bytes for name in names)
    peers = [member.node.statistics() for member in relays.peers]
    return Outcome(
        finished_s=tuple(finished[name] for name in names[1:]),
        source_copies=ups[0] / case.payload_bytes,
        duplicate_share=sum(one.duplicate_bytes for one in peers)
        / sum(one.received_bytes for one in peers),
        cpu_s=cpu_s,
        up_bytes=ups,
        down_bytes=downs,
        redealt=relays.source.node.statistics().chunks_redealt,
    )


async def _one_to_many(case: Case, lines: list[Line], seed: int) -> Outcome:
    network = _make_network(case, lines, seed)
    source = member_name(0)
    finished: dict[int, float] = {}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(network.run)
        payload = make_payload(RelayNet(nursery, network.streams, seed=seed), case.payload_bytes)
        server = OneToMany(payload.assembly.payload().tobytes(), case.peers)
        where = await nursery.start(server.run, network.streams(source), Endpoint(source, PORT))
        peers = [
            await network.streams(member_name(index)).dial(where, timeout_s=60.0)
            for index in range(1, len(lines))
        ]
        await server.connected.wait()
        before, start_s, cpu_s = network.traffic(source), trio.current_time(), time.thread_time()

        async def take(index: int, stream: trio.abc.Stream) -> None:
            await receive_whole(stream, case.payload_bytes)
            finished[index] = trio.current_time() - start_s

        async with trio.open_nursery() as takers:
            server.go.set()
            for index, stream in enumerate(peers):
                takers.start_soon(take, index, stream)
        cpu_s = time.thread_time() - cpu_s
        sent = network.traffic(source).sent_bytes - before.sent_bytes
        nursery.cancel_scope.cancel()
    return Outcome(
        finished_s=tuple(finished[index] for index in range(case.peers)),
        source_copies=sent / case.payload_bytes,
        duplicate_share=0.0,
        cpu_s=cpu_s,
    )
