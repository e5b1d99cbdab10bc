"""What runs beside the model in each of vLLM's workers: weights in, weights read back.

vLLM mixes `WeightsExtension` into its worker class, in this process or, under tensor parallelism,
in one process a rank, and calls its methods by name. All of them see the same flat states through
files: the one to load, and one to read back into.

On CPUs vLLM packs matrices when the model is built; what is loaded later goes to parameters that
nothing computes with, without a word. So this module, which each worker imports before there is a
model, keeps the plain kernels.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from typing import Any, Final

import msgspec
import numpy as np
import torch
import vllm.model_executor.layers.utils as vllm_kernels
from numpy.typing import NDArray
from torch import Tensor, nn
from vllm.distributed import get_tensor_model_parallel_rank

from echo2p2p.errors import EngineError
from echo2p2p.net.memory import map_state
from echo2p2p.weights.layout import Layout
from echo2p2p.weights.touched import Part, selection_bytes, touched_parts
from echo2p2p.wire import codec
from echo2p2p.wire.messages import LayoutTable, TensorSpec
from peer.engine.calls import ProveCall, TouchedFile, parts_of
from peer.engine.state_dtypes import STATE_DTYPES
from peer.engine.vllm_layers import Piece, check_kernels, elements_in, pieces_of, rows_in

MATRIX: Final = 2
"""Dimensions of one."""


def _plain_linear(layer: Any, remove_weight: bool) -> None:  # noqa: ANN401 - any of vLLM's
    """Stand in for vLLM's packing of a layer on CPUs."""
    del remove_weight
    layer.cpu_linear = torch.nn.functional.linear


vllm_kernels.dispatch_cpu_unquantized_gemm = _plain_linear


class WeightsExtension:
    """Methods that vLLM's worker gets; their names must be none of its own."""

    model_runner: Any

    def echo_open(self, table: bytes) -> list[tuple[str, tuple[int, ...]]]:
        """Learn the layout; return this model's names and shapes, of what this rank holds.

        Raises:
            ConfigError: The model has a layer that cannot be read back.
        """
        self._echo_table = codec.decode(table, LayoutTable)
        self._echo_layout = Layout.from_table(self._echo_table)
        self._echo_columns: dict[int, list[int]] = {}
        model = self._echo_model()
        self._echo_pieces = pieces_of(model)
        self._echo_places = _places(model)
        self._echo_turn = 0
        return sorted((name, _extent(pieces)) for name, pieces in self._echo_pieces.items())

    def echo_load(self, path: str) -> None:
        """Copy a flat state into the live parameters, through vLLM's own loaders.

        Raises:
            EngineError: The loaders left a parameter out.
        """
        model: Any = self._echo_model()
        mapped = map_state(path, self._echo_table.total_bytes, writable=False)
        flat = torch.frombuffer(mapped, dtype=torch.uint8)
        with torch.no_grad():
            loaded = model.load_weights(self._echo_tensors(flat))
        del flat
        mapped.close()
        self._echo_columns.clear()
        missing = {name for name, _ in model.named_parameters()} - set(loaded or ())
        if missing:
            raise EngineError(f"vLLM's loader has left out {min(missing)}")

    def _echo_tensors(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        for spec in self._echo_table.tensors:
            tensor = _view(flat, spec)
            yield spec.name, tensor
            for tied in spec.tied:
                pieces = self._echo_pieces.get(tied)
                if pieces and not self._echo_shares(tied, spec.name):
                    yield tied, tensor

    def _echo_shares(self, one: str, other: str) -> bool:
        """Whether two names are one parameter, of the same extent."""
        first, second = self._echo_pieces[one][0].live, self._echo_pieces[other][0].live
        return first.data_ptr() == second.data_ptr() and first.shape == second.shape

    def echo_load_touched(self, path: str, touched: bytes) -> None:
        """Copy touched elements of a flat state into the live parameters.

        Where they are is known from the layers' dimensions. That this is right was proved when all
        was loaded by vLLM's own loaders and read back from there.
        """
        mapped = map_state(path, self._echo_layout.total_bytes, writable=False)
        flat = torch.frombuffer(mapped, dtype=torch.uint8)
        places = msgspec.msgpack.decode(touched, type=TouchedFile).places()
        self._echo_columns.clear()
        with torch.no_grad():
            for part in touched_parts(self._echo_layout, places):
                spec = self._echo_table.tensors[part.tensor]
                assert not isinstance(part.elements, slice)
                self._echo_write(_view(flat, spec), spec, part.elements)
        del flat
        mapped.close()

    def _echo_write(self, tensor: Tensor, spec: TensorSpec, elements: NDArray[np.int64]) -> None:
        """Write some of a tensor's elements, and note a column of each matrix for the proof."""
        values = tensor.reshape(-1)[torch.from_numpy(elements)]
        for _, piece in self._echo_pieces_of(spec):
            held, where = elements_in(piece, spec.shape, elements)
            live = piece.live if spec.shape else piece.live.reshape(1)
            live[where] = values[held].to(live.device, live.dtype)
            if live.ndim == MATRIX and where[1].numel():
                storage = live.untyped_storage().data_ptr()
                self._echo_columns.setdefault(storage, []).append(int(where[1][0]))

    def _echo_pieces_of(self, spec: TensorSpec) -> Iterator[tuple[str, Piece]]:
        """Yield what this rank holds of a tensor: under its name, and under those tied to it."""
        for name in (spec.name, *spec.tied):
            if name == spec.name or not self._echo_shares(name, spec.name):
                for piece in self._echo_pieces.get(name, ()):
                    yield name, piece

    def echo_read_back(self, path: str, rank: int, call: bytes) -> None:
        """Write what this rank's kernels use into the file at ``path``, if it is its turn.

        Parts that an earlier rank has written too must be the same.

        Args:
            path: For all bits that are to be read back, one part after the other.
            rank: Whose turn it is.
            call: What to read back.

        Raises:
            EngineError: A kernel uses something else than its parameter, or ranks differ.
        """
        if get_tensor_model_parallel_rank() != rank:
            return
        model = self._echo_model()
        if _places(model) != self._echo_places:
            raise EngineError("vLLM has moved weights: what it has captured uses the old ones")
        check_kernels(model, self._echo_turn, self._echo_columns)
        self._echo_turn += 1
        parts = parts_of(self._echo_layout, msgspec.msgpack.decode(call, type=ProveCall))
        size = selection_bytes(self._echo_layout, parts)
        with open(path, "r+b") as file:  # noqa: PTH123 - a descriptor of the engine's process
            mapped = mmap.mmap(file.fileno(), size)
        flat = torch.frombuffer(mapped, dtype=torch.uint8)
        at = 0
        for part in parts:
            at += self._echo_read(flat, at, part)
        del flat
        mapped.close()

    def _echo_read(self, flat: Tensor, at: int, part: Part) -> int:
        """Write a part's bits at ``at``; return how many bytes they are."""
        spec = self._echo_table.tensors[part.tensor]
        shape, elements = _shape(spec, part), part.elements
        section = TensorSpec(name=spec.name, dtype=spec.dtype, shape=shape, offset=at, tied=[])
        whole = _view(flat, section)
        for name, piece in self._echo_pieces_of(spec):
            live, target = self._echo_part_of(piece, spec, elements)
            read = live.to("cpu", whole.dtype)
            if piece.owner and name == spec.name:
                whole[target] = read
            elif not _same_bits(whole[target], read):
                raise EngineError(f"{name} differs from {spec.name}, or between ranks")
        _put_back(flat, section, whole)
        return whole.numel() * whole.dtype.itemsize

    def _echo_part_of(
        self, piece: Piece, spec: TensorSpec, elements: NDArray[np.int64] | slice
    ) -> tuple[Tensor, tuple[slice, ...] | Tensor]:
        """Return what a piece holds of these elements, and where among them it belongs."""
        if isinstance(elements, slice):
            return rows_in(piece, spec.shape, elements)
        held, where = elements_in(piece, spec.shape, elements)
        return (piece.live if spec.shape else piece.live.reshape(1))[where], held

    def echo_memory_bytes(self) -> int:
        """Return what this rank's device memory is taken by; 0 without a GPU."""
        return torch.cuda.memory_reserved() if torch.cuda.is_available() else 0

    def _echo_model(self) -> nn.Module:
        model: nn.Module = self.model_runner.get_model()
        return model


def _view(flat: Tensor, spec: TensorSpec) -> Tensor:
    """Return a tensor of the state, sharing its memory; only one that is not aligned is a copy."""
    raw, dtype = _raw(flat, spec), STATE_DTYPES[spec.dtype]
    if spec.offset % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype).view(spec.shape)


def _put_back(flat: Tensor, spec: TensorSpec, tensor: Tensor) -> None:
    """Write what `_view` has returned to where it belongs, if it was a copy."""
    if spec.offset % tensor.dtype.itemsize:
        _raw(flat, spec).copy_(tensor.reshape(-1).view(torch.uint8))


def _raw(flat: Tensor, spec: TensorSpec) -> Tensor:
    size = math.prod(spec.shape) * STATE_DTYPES[spec.dtype].itemsize
    return flat[spec.offset : spec.offset + size]


def _shape(spec: TensorSpec, part: Part) -> list[int]:
    """Return the shape of a part's bits: whole rows, or a list."""
    if isinstance(part.elements, slice) and spec.shape:
        row = max(1, math.prod(spec.shape[1:]))
        return [part.count // row, *spec.shape[1:]]
    return [part.count] if spec.shape else []


def _extent(pieces: list[Piece]) -> tuple[int, ...]:
    return tuple(pieces[0].live.shape)


def _places(model: nn.Module) -> dict[str, int]:
    return {name: parameter.data_ptr() for name, parameter in model.named_parameters()}


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
