"""The bytes of the protocol are those of the repository, to the last one."""

import typing
from pathlib import Path

import msgpack
import msgspec
import pytest

from echo2p2p.errors import ConfigError
from echo2p2p.testing import examples, golden
from echo2p2p.testing.strategies import all_messages
from echo2p2p.wire import codec
from echo2p2p.wire.messages import Message

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
BY_NAME = pytest.mark.parametrize(
    "message", examples.EXAMPLES, ids=lambda each: golden.tag_of(type(each))
)


def file_of(message):
    return FOLDER / f"{golden.tag_of(type(message))}.hex"


def plain(value):
    """Return what MessagePack should hold for a field: written without the codec."""
    if isinstance(value, Message):
        names = type(value).__struct_fields__
        return {"t": golden.tag_of(type(value))} | {n: plain(getattr(value, n)) for n in names}
    return [plain(each) for each in value] if isinstance(value, list) else value


@BY_NAME
def test_an_example_is_encoded_to_its_golden_bytes(message):
    text = file_of(message).read_text(encoding="utf-8")
    assert codec.encode(message) == golden.golden_bytes(text)
    assert text == golden.golden_text(message)


@BY_NAME
def test_golden_bytes_are_decoded_to_the_example(message):
    data = golden.golden_bytes(file_of(message).read_text(encoding="utf-8"))
    assert codec.decode(data, type(message)) == message


@BY_NAME
def test_msgpack_alone_reads_the_expected_map(message):
    data = golden.golden_bytes(file_of(message).read_text(encoding="utf-8"))
    assert msgpack.unpackb(data) == plain(message)


@BY_NAME
def test_a_float_of_an_example_is_a_float_on_the_wire(message):
    for field in msgspec.structs.fields(type(message)):
        hint = typing.get_type_hints(type(message))[field.name]
        value = getattr(message, field.name)
        if (hint is float or float in typing.get_args(hint)) and value is not None:
            assert type(value) is float, field.name


def test_every_message_has_one_example():
    kinds = [type(example) for example in examples.EXAMPLES]
    assert len(set(kinds)) == len(kinds)
    missing = {each.__name__ for each in all_messages()} - {each.__name__ for each in kinds}
    assert not missing, f"add an example to echo2p2p/testing/examples.py of: {sorted(missing)}"


def test_every_golden_file_is_of_a_message_that_exists():
    files = {path.name for path in FOLDER.iterdir() if path.suffix in {".hex", ".txt"}}
    assert files == set(golden.golden_files())


def test_derived_values_are_the_golden_ones():
    wanted = (FOLDER / golden.VALUES_FILE).read_text(encoding="utf-8")
    assert golden.golden_files()[golden.VALUES_FILE] == wanted


def test_the_document_shows_the_golden_bytes():
    text = (ROOT / golden.DOCUMENT).read_text(encoding="utf-8")
    assert golden.document_with_blocks(text) == text, "run `make golden`"


def test_a_golden_file_is_readable():
    text = file_of(examples.EXAMPLES[0]).read_text(encoding="utf-8")
    head, *lines = text.splitlines()
    assert head == "Array array"
    assert all(len(line) == 2 * golden.LINE_BYTES for line in lines[:-1])


def checkout(folder):
    markers = "".join(
        f"<!-- begin {name}: `make golden` writes this -->\nold\n<!-- end {name} -->\n"
        for name in ("examples", "values")
    )
    (folder / golden.DOCUMENT).write_text(f"before\n{markers}after\n", encoding="utf-8")
    return folder


def test_writing_makes_what_is_in_the_repository_and_removes_what_is_stale(tmp_path):
    stale = checkout(tmp_path) / golden.FOLDER / "gone.hex"
    stale.parent.mkdir(parents=True)
    stale.write_text("Gone gone\n", encoding="utf-8")
    touched = golden.write_all(tmp_path)
    assert stale in touched
    assert not stale.exists()
    for path in (tmp_path / golden.FOLDER).iterdir():
        assert path.read_text(encoding="utf-8") == (FOLDER / path.name).read_text(encoding="utf-8")
    document = (tmp_path / golden.DOCUMENT).read_text(encoding="utf-8")
    assert document.startswith("before\n")
    assert document.endswith("after\n")
    assert "old" not in document.splitlines()
    assert golden.write_all(tmp_path) == []


def test_a_document_without_its_markers_is_an_error_and_not_overwritten(tmp_path):
    document = tmp_path / golden.DOCUMENT
    document.write_text("# nothing\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="marker"):
        golden.write_all(tmp_path)
    assert document.read_text(encoding="utf-8") == "# nothing\n"


def test_the_repository_is_found_from_the_module():
    assert golden.checkout_root() == ROOT
