import json

import msgspec

from echo2p2p.wire.messages import Outcome, UploadReply
from scenarios.live_node import Body, FileRecord, Orders, PeerPart, read_orders, read_record
from scenarios.record import Record


def part(**more):
    return PeerPart(
        settings={},
        start_s=0,
        load_s=0,
        seconds_per_token=0,
        lengths=(0, 0, False),
        seed=1,
        can_lie=True,
        record="",
        **more,
    )


def reply(lease_id, *, accepted, reason=None, duplicate=False):
    outcome = Outcome(lease_id=lease_id, accepted=accepted, reason=reason)
    return UploadReply(outcome=outcome, duplicate=duplicate)


def test_what_a_client_was_told_survives_its_process(tmp_path):
    path = tmp_path / "record.jsonl"
    record = FileRecord(path)
    record.samples["s1"] = "a"
    record.decided("a", 2, reply("a", accepted=True))
    record.decided("b", 2, reply("b", accepted=False, reason="stale"))
    record.samples["s2"] = "c"  # sent, and killed before the answer
    path.write_text(path.read_text() + '["half", ')
    seen = Record()
    read_record(path, seen)
    assert seen.acknowledged == {"a": 2}
    assert seen.refused == {"b": "stale"}
    assert seen.samples == {"s1": "a", "s2": "c"}
    read_record(tmp_path / "nothing", seen)


def test_orders_are_obeyed_once_each_and_by_later_engines_too(tmp_path):
    assert read_orders(tmp_path) == Orders()
    (tmp_path / "orders.json").write_bytes(
        msgspec.json.encode(Orders(lies=["corrupt"], pace=3.0, ahead_s=60.0, kills=1))
    )
    body = Body(part())
    engine = body.make_engine()
    body.obey(read_orders(tmp_path))
    assert body.lies.told == {"corrupt"}
    assert body.pace.factor == 3.0
    assert body.clock.ahead_s == 60.0
    assert engine._life.over.is_set()
    fresh = body.make_engine()
    body.obey(read_orders(tmp_path))
    assert not fresh._life.over.is_set(), "ordered once, done once"
    body.obey(Orders())
    assert body.lies.told == set()
    assert json.loads(msgspec.json.encode(Orders()))["pace"] == 1.0
