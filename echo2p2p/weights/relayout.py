"""The same weights under another layout: what a delta starts from when tensors came or went.

The problem: a delta is between states of one layout, and a model may gain a tensor, lose one, or
change one's shape. The idea: both sides carry over what kept its name, dtype and shape, leave
zeros for the rest, and take the delta from there; a tensor that is new is then sent whole by the
form that suits it. Which tensors those are follows from the two tables alone.
"""

from __future__ import annotations

from echo2p2p.weights.layout import Layout, flat_bytes


def carry_over(
    old: Layout, state: bytes | bytearray | memoryview, new: Layout
) -> tuple[bytearray, tuple[str, ...]]:
    """Return the base under ``new``, and the names of its tensors that start from zeros.

    A name that was tied to another tensor keeps that tensor's values when it is untied.

    Raises:
        LocalProtocolError: ``state`` has another length than ``old`` says.
    """
    flat = flat_bytes(old, state)
    places = {}
    for spec, tensor in zip(old.table.tensors, old.tensors, strict=True):
        for name in (spec.name, *spec.tied):
            places[name] = (spec.dtype, spec.shape, tensor)
    base, fresh = bytearray(new.total_bytes), []
    for spec, tensor in zip(new.table.tensors, new.tensors, strict=True):
        dtype, shape, source = places.get(spec.name, ("", [], None))
        if source is None or (dtype, shape) != (spec.dtype, spec.shape):
            fresh.append(spec.name)
            continue
        content = flat[source.offset : source.offset + source.bytes]
        base[tensor.offset : tensor.offset + tensor.bytes] = content.data
    return base, tuple(fresh)
