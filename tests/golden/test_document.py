"""PROTOCOL.md says what the code does: its tables are compared, its formulas computed by hand."""

import base64
import re
import struct
import types
import typing
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from coordinator import membership
from echo2p2p import limits
from echo2p2p.errors import Violation
from echo2p2p.rollouts.trajectory import Reason
from echo2p2p.testing import examples, golden
from echo2p2p.testing.strategies import all_messages
from echo2p2p.weights.blocks import ANCHOR_BLOCK_ELEMENTS, BLOCK_ELEMENTS_MAX
from echo2p2p.weights.forms import Form
from echo2p2p.weights.layout import DTYPES
from echo2p2p.weights.ordered import CLASSES
from echo2p2p.weights.streams import PACKED_MAX
from echo2p2p.weights.tight import CHANGES_MAX
from echo2p2p.wire import codec
from echo2p2p.wire.messages import CaReply, JoinReply, JoinRequest, MemberCard, Message

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "PROTOCOL.md").read_text(encoding="utf-8")
VALUES = golden.values()


def rows(text, columns):
    """Return the cells of each table row in ``text`` with so many columns, heads left out."""
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line[:1] == "|" else []
        if len(cells) == columns and not set(cells[0]) <= {"-"}:
            found.append(cells)
    return found


def section(title):
    _, found, rest = TEXT.partition(f"\n{title}\n")
    assert found, title
    level = len(title) - len(title.lstrip("#"))
    return re.split(rf"\n#{{1,{level}}} ", rest, maxsplit=1)[0]


def quoted(cell):
    return re.findall(r"`([^`]+)`", cell)


def said(hint):
    """Return an annotation as the tables write it."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return " ".join(f"`{each}`" for each in arguments)
    if origin is list:
        return f"list of {said(arguments[0])}"
    if origin is types.UnionType:
        assert arguments[1] is type(None)
        return f"{said(arguments[0])} or nil"
    if issubclass(hint, Message):
        return f"`{hint.__name__}`"
    return {str: "text"}.get(hint, hint.__name__)


# --- tables -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", all_messages(), ids=lambda kind: kind.__name__)
def test_the_table_of_a_message_has_its_fields_and_their_types(kind):
    text = section(f"#### `{kind.__name__}` · `{golden.tag_of(kind)}`")
    table = [(quoted(name)[0], hint) for name, hint, _ in rows(text, 3) if name != "field"]
    hints = typing.get_type_hints(kind)
    assert table == [(name, said(hints[name])) for name in kind.__struct_fields__]


def test_the_limits_are_the_codes():
    table = {
        quoted(name)[0]: float(number)
        for name, number, _ in rows(section("## 9. Limits"), 3)
        if number.isdigit()
    }
    code = {
        name: float(value)
        for name, value in vars(limits).items()
        if name.isupper() and name not in {"KIB", "MIB"}
    }
    assert table == code


def test_the_routes_are_the_coordinators():
    source = (ROOT / "coordinator" / "api.py").read_text(encoding="utf-8")
    body = {"0": "0", "small": "HTTP_CONTROL_BYTES_MAX", "large": "HTTP_BODY_BYTES_MAX"}
    route = r'Route\("(\w+)", "([^"]+)", .+?, (0|small|large)(?:, [\w.]+)?\),'
    code = [(f"{method} {path}", body[size]) for method, path, size in re.findall(route, source)]
    table = [(quoted(row[0])[0], row[4]) for row in rows(TEXT, 5) if row[0] != "route"]
    assert len(code) == source.count(" Route(")
    assert sorted(table) == sorted(code)


def test_the_refusals_are_the_coordinators():
    sources = [ROOT / "coordinator" / "api.py", ROOT / "echo2p2p" / "net" / "routing.py"]
    text = "".join(path.read_text(encoding="utf-8") for path in sources)
    code = set(re.findall(r'refusal\(\s*\d+,\s*"(\w+)"', text))
    code |= set(re.findall(r'REASON_\w+: Final = "(\w+)"', text))
    table = {quoted(row[1])[0] for row in rows(section("## 3. HTTP"), 4) if row[0] != "status"}
    assert table == code


def test_the_states_and_their_changes_are_the_coordinators():
    table = {
        quoted(state)[0]: set(quoted(following))
        for state, _, following in rows(section("## 3. HTTP"), 3)
        if quoted(state) and quoted(state)[0] in set(membership.State)
    }
    code = {
        state.value: {each.value for each in after} for state, after in membership._NEXT.items()
    }
    assert table == code


def test_the_reasons_of_an_outcome_are_the_codes():
    table = {quoted(row[0])[0] for row in rows(section("## 3. HTTP"), 2) if row[0] != "reason"}
    assert table == {reason.value for reason in Reason}


def test_every_violation_is_explained():
    assert [each.value for each in Violation if f"`{each.value}`" not in TEXT] == ["too_much"]


def test_the_forms_and_dtypes_are_the_codes():
    table = {name: int(number) for name, number, _ in rows(section("## 7. The payload"), 3)[1:]}
    assert table == {form.name: int(form) for form in Form}
    shown = {}
    for names, bits, where in rows(section("## 6. The flat state"), 3)[1:]:
        first, last = (
            map(int, re.findall(r"bits (\d+) to (\d+)", where)[0]) if "to" in where else (0, -1)
        )
        for name, width in zip(quoted(names), bits.split(), strict=True):
            shown[name] = (int(width), first, last - first + 1)
    assert shown == {
        name: (8 * each.item_bytes, each.exponent_shift, each.exponent_mask.bit_length())
        for name, each in DTYPES.items()
    }


def test_numbers_in_the_text_are_the_codes():
    assert "elements, 1 to 2^28" in TEXT
    assert BLOCK_ELEMENTS_MAX == 2**28
    assert "blocks\nof 2^18 elements" in TEXT
    assert ANCHOR_BLOCK_ELEMENTS == 2**18
    assert "in parts of 2^18" in TEXT
    assert PACKED_MAX == 2**18
    assert "1 to min(count, 2^26)" in TEXT
    assert CHANGES_MAX == 2**26
    assert "1 + min(max(exponent - l, 0), 14)" in TEXT
    assert CLASSES == 16


# --- formulas, computed as the text says them ---------------------------------------------------


def value(name):
    return bytes.fromhex(VALUES[name])


def example(kind):
    return next(each for each in examples.EXAMPLES if isinstance(each, kind))


def check(public_key, message, signature):
    Ed25519PublicKey.from_public_bytes(public_key).verify(signature, message)


def test_fingerprint_peer_id_and_token_follow_the_text():
    fingerprint = blake3(b"echo2p2p run 0" + value("run public key")).digest(length=20)
    assert fingerprint == value("run fingerprint")
    peer_id = blake3(b"echo2p2p peer 0" + value("peer public key")).digest(length=16).hex()
    assert peer_id == VALUES["peer id"]
    raw = base64.b32decode(VALUES["join token"].removeprefix("e2p-").upper())
    assert raw[16:36] == fingerprint
    assert raw[36:] == blake3(b"echo2p2p token 0" + raw[:36]).digest(length=4)
    credential = blake3(b"echo2p2p credential 0" + b"e2c-example").digest()
    assert credential == value("credential digest of e2c-example")


def test_the_join_proof_follows_the_text():
    request = example(JoinRequest)
    parts = (
        request.public_key,
        value("run fingerprint"),
        request.nonce,
        request.csr,
        request.name.encode(),
    )
    message = b"echo2p2p join 0\0" + b"".join(struct.pack("<I", len(p)) + p for p in parts)
    check(request.public_key, message, request.proof)


@pytest.mark.parametrize("signer", ["peer", "source"])
def test_the_link_proof_follows_the_text(signer):
    hello, proof, source_hello, source_proof = examples.link_proofs()
    sides = [(hello.nonce, VALUES["peer id"]), (source_hello.nonce, "source")]
    key, signature = value("peer public key"), proof.signature
    if signer == "source":
        sides.reverse()
        key, signature = value("run public key"), source_proof.signature
    (nonce, name), (other_nonce, other_name) = sides
    parts = (nonce, other_nonce, name.encode(), other_name.encode(), examples.RUN_ID.encode())
    message = b"echo2p2p link 0\0" + b"".join(struct.pack(">I", len(p)) + p for p in parts)
    check(key, message, signature)


def test_signatures_of_records_follow_the_text():
    body = codec.encode(examples.header(anchor=False))
    check(value("run public key"), b"echo2p2p manifest 0\0" + body, value("manifest signature"))
    assert blake3(body).digest(length=16) == value("manifest id")
    card = codec.encode(example(MemberCard))
    check(value("run public key"), b"echo2p2p card 0\0" + card, value("card signature"))


def test_certificates_follow_the_text():
    authority = x509.load_pem_x509_certificate(example(CaReply).certificate)
    assert authority.public_key().public_bytes_raw() == value("run public key")
    assert f"echo2p2p run {VALUES['run fingerprint']}" in authority.subject.rfc4514_string()
    leaf = x509.load_pem_x509_certificate(example(JoinReply).certificate)
    leaf.verify_directly_issued_by(authority)
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [f"{VALUES['peer id']}.peer.echo2p2p"]
    assert (leaf.not_valid_after_utc - leaf.not_valid_before_utc).days == 366


def test_the_state_digest_follows_the_text():
    layout = blake3(codec.encode(examples.LAYOUT.table)).digest()
    assert layout == value("layout digest")
    for name in ("base state", "result state"):
        blocks = blake3(value(name)).digest()  # under 1 MiB, so it is one block
        assert blake3(b"echo2p2p state 0\0" + layout + blocks).digest() == value(f"{name} digest")


@pytest.mark.parametrize("content", ["delta", "anchor"])
def test_the_index_is_the_digests_of_the_chunks(content):
    assert value(f"{content} index") == blake3(value(f"{content} payload")).digest()


def test_the_delta_is_what_the_text_says_byte_by_byte():
    payload = value("delta payload")
    assert payload[:4] == b"EWD\0"
    sequence, first, count, form, length = struct.unpack_from("<BQIBI", payload, 4)
    assert (sequence, first, count, form) == (0, 0, 19, Form.FAST)
    body = payload[4 + 18 :]
    assert len(body) == length
    stored_2, repeated_1 = 2 << 2 | 0, 1 << 2 | 2
    changed, gap_bytes, gaps = 2, 1, 2
    planes = [repeated_1, 1, repeated_1, 0]  # low bytes all 1, high bytes all 0
    assert list(body) == [changed, gap_bytes, gaps, stored_2, 0, 17, *planes]
    bits = np.frombuffer(value("base state"), dtype="<u2").copy()
    zigzag = 1 + 1
    for place in (0, 0 + 1 + 17):
        ordered = int(bits[place]) ^ (0x7FFF if bits[place] & 0x8000 else 0)
        moved = (ordered + (zigzag >> 1)) % 2**16
        bits[place] = moved ^ (0x7FFF if moved & 0x8000 else 0)
    assert bits.tobytes() == value("result state")


def test_a_frame_is_its_length_and_the_message():
    frame = value("ping frame with its length")
    assert struct.unpack(">I", frame[:4]) == (len(frame) - 4,)
    file = (ROOT / golden.FOLDER / "ping.hex").read_text(encoding="utf-8")
    assert frame[4:] == golden.golden_bytes(file)
