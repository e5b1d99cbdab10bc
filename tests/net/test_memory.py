"""Shared states in files."""

import numpy as np
import pytest

from echo2p2p.errors import LocalProtocolError, StoreError
from echo2p2p.net.memory import FileMemory, map_state


def test_what_one_side_writes_the_other_reads(tmp_path):
    state = FileMemory(tmp_path / "new").allocate("w", 10_000)
    assert bytes(state.view) == bytes(10_000)
    other = map_state(state.path, 10_000, writable=True)
    other[3:6] = b"abc"
    assert bytes(state.view[2:7]) == b"\0abc\0"
    other.close()
    state.close()
    assert list((tmp_path / "new").iterdir()) == []


def test_a_reader_cannot_change_the_state(tmp_path):
    state = FileMemory(tmp_path).allocate("w", 16)
    reader = map_state(state.path, 16, writable=False)
    reader[0:1] = b"x"
    assert bytes(state.view) == bytes(16)
    state.close()


def test_allocating_again_gives_zeros_and_leaves_the_old_mapping_alone(tmp_path):
    memory = FileMemory(tmp_path)
    old = memory.allocate("w", 8)
    old.view[:] = b"12345678"
    new = memory.allocate("w", 4)
    assert (bytes(new.view), bytes(old.view)) == (bytes(4), b"12345678")
    new.close()


def test_close_is_idempotent_and_survives_arrays_that_still_look_in(tmp_path):
    state = FileMemory(tmp_path).allocate("w", 8)
    array = np.frombuffer(state.view, dtype=np.uint8)
    state.close()
    state.close()
    assert array.sum() == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "size"), [("", 1), ("a/b", 1), ("..", 1), ("w", 0), ("w", -1)])
def test_names_are_plain_and_sizes_positive(tmp_path, name, size):
    with pytest.raises(LocalProtocolError):
        FileMemory(tmp_path / "folder").allocate(name, size)


def test_a_scratch_block_has_no_name_that_a_crash_could_leave_behind(tmp_path):
    state = FileMemory(tmp_path / "memory").scratch(10_000)
    assert list((tmp_path / "memory").iterdir()) == []
    state.view[:5] = b"hello"
    assert bytes(state.view[:5]) == b"hello"
    state.close()


def test_a_full_disk_is_an_error_at_once(tmp_path):
    with pytest.raises(StoreError, match=r"keep .* MB of weights"):
        FileMemory(tmp_path).allocate("w", 1 << 60)
    assert list(tmp_path.iterdir()) == []


def test_a_state_of_another_size_or_none_is_refused(tmp_path):
    state = FileMemory(tmp_path).allocate("w", 8)
    with pytest.raises(StoreError, match="of 8 bytes where 9"):
        map_state(state.path, 9, writable=False)
    state.close()
    with pytest.raises(StoreError, match="cannot map"):
        map_state(state.path, 8, writable=False)


def test_a_kept_block_outlives_the_process_and_takes_up_its_room_again(tmp_path):
    state = FileMemory(tmp_path).keep("p", 10_000)
    state.view[5:8] = b"abc"
    del state  # as a killed process would leave it
    later = FileMemory(tmp_path)
    assert later.kept() == ["p"]
    assert bytes(later.keep("p", 10_000).view[5:8]) == b"abc"
