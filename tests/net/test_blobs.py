"""What both kinds of blobs promise, then what happens on a real file system."""

import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio

from echo2p2p.errors import LocalProtocolError, StoreError
from echo2p2p.net.blobs import FileBlobs
from echo2p2p.net.ports import Blobs
from echo2p2p.net.process_memory import memory_of
from echo2p2p.testing.clock import run_virtual
from echo2p2p.testing.disk import SimDisk

Open = Callable[[], Blobs]
Story = Callable[[Open], Awaitable[None]]


@pytest.fixture(params=["files", "simulated"])
def form(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Story], None]:
    """Run a story with a function that opens the same blobs again and again."""

    def with_files(story: Story) -> None:
        async def main() -> None:
            with trio.fail_after(20):
                await story(lambda: FileBlobs(tmp_path / "blobs"))

        trio.run(main)

    def with_simulation(story: Story) -> None:
        async def main() -> None:
            await story(SimDisk().blobs)

        run_virtual(main, seed=1)

    return with_files if request.param == "files" else with_simulation


def test_a_blob_is_there_until_it_is_replaced_or_deleted(form) -> None:
    async def story(open_blobs: Open) -> None:
        blobs = open_blobs()
        assert await blobs.names() == []
        await blobs.put("b-1.bin", b"one")
        await blobs.put("a", memoryview(b"two"))
        await blobs.put("c", bytearray(b""))
        assert await blobs.names() == ["a", "b-1.bin", "c"]
        await blobs.put("a", b"three")
        assert [await blobs.get(name) for name in ("a", "b-1.bin", "c")] == [b"three", b"one", b""]
        await blobs.delete("c")
        await blobs.delete("c")
        assert await open_blobs().names() == ["a", "b-1.bin"]
        assert await open_blobs().get("a") == b"three"

    form(story)


def test_a_blob_that_is_not_there_is_a_store_error(form) -> None:
    async def story(open_blobs: Open) -> None:
        with pytest.raises(StoreError, match="there is no blob x"):
            await open_blobs().get("x")
        with pytest.raises(StoreError, match="there is no blob x"):
            await open_blobs().find("x")

    form(story)


def test_a_part_of_a_blob_is_read_where_it_lies(form) -> None:
    async def story(open_blobs: Open) -> None:
        blobs = open_blobs()
        await blobs.put("x", b"0123456789")
        await blobs.put("empty", b"")
        found = await blobs.find("x")
        assert found.length == 10
        assert (found.read(0, 10), found.read(3, 4), found.read(10, 0)) == (
            b"0123456789",
            b"3456",
            b"",
        )
        assert (await blobs.find("empty")).length == 0

    form(story)


def test_a_part_that_is_not_there_any_more_is_a_store_error(form) -> None:
    async def story(open_blobs: Open) -> None:
        blobs = open_blobs()
        await blobs.put("x", b"0123456789")
        found = await blobs.find("x")
        await blobs.put("x", b"01234")
        assert found.read(0, 5) == b"01234"
        with pytest.raises(StoreError, match="x: it was cut short: start again"):
            found.read(3, 4)
        await blobs.delete("x")
        with pytest.raises(StoreError, match="cannot read"):
            found.read(0, 1)

    form(story)


async def test_a_blob_that_is_found_is_no_memory_of_ours(tmp_path: Path) -> None:
    blobs = FileBlobs(tmp_path)
    size = 64 << 20
    await blobs.put("large", bytes(size))
    found = await blobs.find("large")
    before = memory_of(os.getpid())
    for start in range(0, size, 1 << 20):
        assert len(found.read(start, 1 << 20)) == 1 << 20
    assert memory_of(os.getpid()).private_bytes - before.private_bytes < size // 8


@pytest.mark.parametrize("name", ["", ".", "..", ".x", "a/b", "../a", "a\x00", "é", "a" * 129])
def test_a_name_is_never_a_path(form, name: str) -> None:
    async def story(open_blobs: Open) -> None:
        blobs = open_blobs()
        for use in (blobs.get, blobs.find, blobs.delete, lambda name: blobs.put(name, b"")):
            with pytest.raises(LocalProtocolError):
                await use(name)

    form(story)


def test_of_two_writers_of_one_name_one_wins_whole(form) -> None:
    async def story(open_blobs: Open) -> None:
        blobs = open_blobs()
        async with trio.open_nursery() as nursery:
            for letter in b"abcd":
                nursery.start_soon(blobs.put, "x", bytes([letter]) * 100_000)
        content = await blobs.get("x")
        assert content in [bytes([letter]) * 100_000 for letter in b"abcd"]
        assert await blobs.names() == ["x"]

    form(story)


async def test_what_a_crash_left_half_written_is_swept_and_never_seen(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "blobs"
    await FileBlobs(folder).put("x", b"whole")
    (folder / ".new-7-x").write_bytes(b"ha")
    blobs = FileBlobs(folder)
    assert await blobs.names() == ["x"]
    assert sorted(path.name for path in folder.iterdir()) == ["x"]
    assert await blobs.get("x") == b"whole"


async def test_a_write_that_fails_keeps_the_old_content_and_says_why(tmp_path: Path) -> None:
    blobs = FileBlobs(tmp_path)
    (tmp_path / "x").mkdir()  # a folder cannot be replaced by a file
    with pytest.raises(StoreError, match="cannot write") as caught:
        await blobs.put("x", b"data")
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_folder_that_cannot_be_made_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="cannot use the folder"):
        FileBlobs(tmp_path / "file" / "blobs")
