"""Golden bytes: what each example of `echo2p2p.testing.examples` must look like on the wire.

The problem: a change of a field's name or order changes the protocol, and no round trip notices.
The idea: the bytes of one example of each message are files of the repository, and so is whatever
else two implementations must compute alike (ids, digests, signatures, a payload of each kind). The
tests compare; ``python -m echo2p2p.testing.golden`` (``make golden``) writes them anew, together
with the examples in PROTOCOL.md, on purpose and in a commit of their own.

It refuses to run outside of a checkout.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Final, TypeVar

import msgpack

from echo2p2p.errors import ConfigError, EchoError
from echo2p2p.ids import digest_of, manifest_id_of
from echo2p2p.net.trust import credential_digest
from echo2p2p.testing import examples
from echo2p2p.weights.state import state_digest
from echo2p2p.wire import codec
from echo2p2p.wire.frames import encode_frame
from echo2p2p.wire.messages import ManifestHeader, MemberCard, Message, Ping
from echo2p2p.wire.signing import sign_record

FOLDER: Final = Path("tests", "golden")
DOCUMENT: Final = Path("PROTOCOL.md")
VALUES_FILE: Final = "values.txt"
LINE_BYTES: Final = 32
_BYTES_SHOWN: Final = 12
"""Of a byte string in the readable form, where it is longer than twice that."""
_CHARACTERS_SHOWN: Final = 40

MessageT = TypeVar("MessageT", bound=Message)


def tag_of(kind: type[Message]) -> str:
    """Return what stands under ``t`` in messages of ``kind``; also names the golden file."""
    tag = kind.__struct_config__.tag
    assert isinstance(tag, str), kind
    return tag


def golden_text(message: Message) -> str:
    """Return a golden file's text: the message's name and tag, then its bytes in hex."""
    kind = type(message)
    return f"{kind.__name__} {tag_of(kind)}\n{_hex_lines(codec.encode(message))}\n"


def golden_bytes(text: str) -> bytes:
    """Return the bytes in a golden file's text."""
    return bytes.fromhex("".join(text.splitlines()[1:]))


def golden_files() -> dict[str, str]:
    """Return the text of each file of the golden folder, by file name."""
    files = {f"{tag_of(type(each))}.hex": golden_text(each) for each in examples.EXAMPLES}
    files[VALUES_FILE] = "".join(f"{name} = {value}\n" for name, value in values().items())
    return files


def values() -> dict[str, str]:
    """Return what is derived from the examples' run: hex, or the text itself for text."""
    card = _example(MemberCard)
    signed = sign_record(examples.KEYS.private, _example(ManifestHeader))
    _, proof, _, source_proof = examples.link_proofs()
    delta, anchor = examples.payload(anchor=False), examples.payload(anchor=True)
    layout = examples.LAYOUT
    credential = "e2c-example"
    raw: dict[str, str | bytes] = {
        "run private key": examples.RUN_SEED,
        "run public key": examples.KEYS.public_key,
        "run fingerprint": examples.TOKEN.fingerprint,
        "join token": examples.TOKEN.encode(),
        "peer private key": examples.PEER_SEED,
        "peer public key": examples.PEER.public_key,
        "peer id": examples.PEER.peer_id,
        "card signature": sign_record(examples.KEYS.private, card).signature,
        "manifest signature": signed.signature,
        "manifest id": manifest_id_of(signed.body),
        "link proof of the peer": proof.signature,
        "link proof of the source": source_proof.signature,
        f"credential digest of {credential}": credential_digest(credential),
        "ping frame with its length": encode_frame(_example(Ping)),
        "digest of nothing": digest_of(b""),
        "layout digest": layout.digest,
        "base state": examples.BASE_STATE,
        "base state digest": state_digest(layout, examples.BASE_STATE),
        "result state": examples.RESULT_STATE,
        "result state digest": state_digest(layout, examples.RESULT_STATE),
        "delta payload": bytes(delta.payload),
        "delta index": delta.index,
        "anchor payload": bytes(anchor.payload),
        "anchor index": anchor.index,
        "anchor header": codec.encode(examples.header(anchor=True)),
    }
    return {name: each if isinstance(each, str) else each.hex() for name, each in raw.items()}


def examples_block() -> str:
    """Return the part of PROTOCOL.md that shows each message: readable, then its bytes."""
    parts = []
    for message in examples.EXAMPLES:
        kind, data = type(message), codec.encode(message)
        readable = textwrap.fill(
            _readable(msgpack.unpackb(data)),
            width=98,
            break_long_words=False,
            break_on_hyphens=False,
            subsequent_indent="  ",
        )
        title = f"`{kind.__name__}` (`{tag_of(kind)}`), {len(data)} bytes:"
        parts.append(f"{title}\n\n```text\n{readable}\n\n{_hex_lines(data)}\n```\n")
    return "\n".join(parts)


def values_block() -> str:
    """Return the part of PROTOCOL.md that shows the derived values."""
    lines: list[str] = []
    for name, value in values().items():
        lines.append(f"{name}:")
        lines += textwrap.wrap(value, width=2 * LINE_BYTES, break_on_hyphens=False)
    return "```text\n" + "\n".join(lines) + "\n```\n"


def document_with_blocks(text: str) -> str:
    """Return PROTOCOL.md with its made parts made anew.

    Raises:
        ConfigError: A marker is missing.
    """
    for name, block in (("examples", examples_block()), ("values", values_block())):
        begin, end = f"<!-- begin {name}: `make golden` writes this -->", f"<!-- end {name} -->"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise ConfigError(str(DOCUMENT), f"the marker {begin!r} or its end is missing")
        text = f"{before}{begin}\n\n{block}\n{end}{after}"
    return text


def checkout_root() -> Path:
    """Return the repository that this module is part of.

    Raises:
        ConfigError: It is an installed copy.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / "pyproject.toml").is_file():
        raise ConfigError("golden", "this is an installed copy: run it in a checkout (pip -e)")
    return root


def write_all(root: Path) -> list[Path]:
    """Write whatever differs, remove files of messages that are gone; return those touched."""
    folder = root / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {folder / name: text for name, text in golden_files().items()}
    document = root / DOCUMENT
    wanted[document] = document_with_blocks(document.read_text(encoding="utf-8"))
    touched = []
    for path, text in wanted.items():
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            touched.append(path)
    for path in sorted(folder.glob("*.hex")):
        if path not in wanted:
            path.unlink()
            touched.append(path)
    return touched


def main() -> int:
    """Write the golden bytes of this checkout; returns the exit code."""
    try:
        root = checkout_root()
        touched = write_all(root)
    except EchoError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.writelines(f"wrote {path.relative_to(root)}\n" for path in touched)
    sys.stdout.write(f"{len(touched)} files changed\n")
    return 0


def _example(kind: type[MessageT]) -> MessageT:
    return next(each for each in examples.EXAMPLES if isinstance(each, kind))


def _hex_lines(data: bytes) -> str:
    return "\n".join(
        data[start : start + LINE_BYTES].hex() for start in range(0, len(data), LINE_BYTES)
    )


def _readable(value: object) -> str:
    """Return a decoded message for people, long strings cut."""
    match value:
        case dict():
            return "{" + ", ".join(f"{key}: {_readable(each)}" for key, each in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(_readable, value)) + "]"
        case bytes() if len(value) > 2 * _BYTES_SHOWN:
            return f"h'{value[:_BYTES_SHOWN].hex()}..'({len(value)} bytes)"
        case bytes():
            return f"h'{value.hex()}'"
        case str() if len(value) > _CHARACTERS_SHOWN:
            return f'"{value[:_CHARACTERS_SHOWN]}.."({len(value)} characters)'
        case str():
            return '"' + value + '"'
        case None:
            return "nil"
        case bool():
            return str(value).lower()
        case _:
            return repr(value)


if __name__ == "__main__":
    sys.exit(main())
