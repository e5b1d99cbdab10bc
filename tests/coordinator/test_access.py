"""join.json: who may read it, and what is said when there is none."""

import json
import stat

import pytest

from coordinator.access import JOIN_FILE, Access, read_access, write_access
from coordinator.app import Opened
from echo2p2p.errors import ConfigError
from echo2p2p.wire.messages import Address

OPENED = Opened(
    url="https://lab.example:7070",
    token="e2p-token",
    admin_token="e2a-admin",
    relay=Address(host="lab.example", port=1),
    authority=b"-----BEGIN CERTIFICATE-----\n",
)


def test_what_is_written_is_read_from_the_folder_or_from_a_copy(tmp_path):
    write_access(tmp_path, OPENED)
    expected = Access(OPENED.url, "e2a-admin", "e2p-token", OPENED.authority)
    assert read_access(tmp_path) == expected
    copy = tmp_path / "copy.json"
    copy.write_bytes((tmp_path / JOIN_FILE).read_bytes())
    assert read_access(copy) == expected


def test_only_its_owner_can_read_it_even_where_an_earlier_one_was_open(tmp_path):
    for name in (JOIN_FILE, f"{JOIN_FILE}.new"):
        (tmp_path / name).write_text("{}")
        (tmp_path / name).chmod(0o644)
    write_access(tmp_path, OPENED)
    assert stat.S_IMODE((tmp_path / JOIN_FILE).stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == [JOIN_FILE]


def test_without_tls_there_is_no_authority(tmp_path):
    write_access(tmp_path, Opened("http://127.0.0.1:1", "t", "a", OPENED.relay, None))
    assert read_access(tmp_path).authority is None


@pytest.mark.parametrize(
    ("content", "mend"),
    [
        (None, "give a URL, a run's folder or its join.json"),
        ("", "is not a run's join.json"),
        ("[]", "is not a run's join.json"),
        (json.dumps({"url": "x"}), "is not a run's join.json"),
    ],
)
def test_what_is_no_join_file_is_said_in_one_line(tmp_path, content, mend):
    if content is not None:
        (tmp_path / JOIN_FILE).write_text(content)
    with pytest.raises(ConfigError, match=mend) as caught:
        read_access(tmp_path)
    assert "\n" not in str(caught.value)
