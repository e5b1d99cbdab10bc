"""The learner's publish copies, and on a GPU what changed from one to the next.

The problem: to encode a delta somebody must compare two states, and on the CPU that is a good part
of the work. The idea: the GPU has ten times the bandwidth, so it keeps the last copy, compares it
with the next, and lists what changed for the encoder (`echo2p2p.weights.found`), which is another
process. The copy itself crosses the bus whole: it is to be published, digested and kept.

On a CPU the encoder's own loops are quicker than torch, and a device without room for two more
copies beside what training needs does as a CPU does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from coordinator.learner.changes import TorchFinder
from coordinator.learner.layout import fill_state
from echo2p2p.net.memory import map_state
from echo2p2p.weights.found import room_for, write_found
from echo2p2p.weights.layout import Layout


class Exporter:
    """Writes publish copies of one model's tensors.

    Args:
        layout: Of the copy.
        tensors: The model's own, by name; all on one device.
        has_room: Asked at each call whether to look for changes there, which takes memory for
            two more copies, one of them for good.
    """

    def __init__(
        self, layout: Layout, tensors: Mapping[str, Tensor], *, has_room: Callable[[], bool]
    ) -> None:
        self._layout = layout
        self._tensors = tensors
        self._has_room = has_room
        self._tries = True
        self._last: Tensor | None = None
        """The copy before, ``[total_bytes] uint8``, on the device."""

    def write(self, path: str, found_path: str) -> int | None:
        """Write the copy, rounded to nearest even, into the shared state at ``path``.

        Args:
            path: Of the layout's size.
            found_path: Where to list the changes since the last call; "": nowhere.

        Returns:
            Bytes of that list; ``None``: there is none.

        Raises:
            StoreError: Shared memory is missing or of another size.
        """
        last, self._last = self._last, None  # whatever comes: no list is since an older copy
        mapped = map_state(path, self._layout.total_bytes, writable=True)
        flat = torch.frombuffer(mapped, dtype=torch.uint8)
        try:
            if self._tries and found_path and self._has_room():
                try:
                    return self._write_changes(last, flat, found_path)
                except torch.cuda.OutOfMemoryError:
                    self._tries = False
            fill_state(self._layout, self._tensors, flat)
            return None
        finally:
            del flat
            mapped.close()

    def _write_changes(self, last: Tensor | None, flat: Tensor, found_path: str) -> int | None:
        layout = self._layout
        device = next(iter(self._tensors.values())).device
        bits = torch.empty(layout.total_bytes, dtype=torch.uint8, device=device)
        fill_state(layout, self._tensors, bits)
        size = None
        if last is not None:
            room = map_state(found_path, room_for(layout), writable=True)
            memory = np.frombuffer(room, np.uint8)
            size = write_found(layout, TorchFinder(layout, last, bits), memory)
            del memory
            room.close()
        flat.copy_(bits)
        self._last = bits
        return size
