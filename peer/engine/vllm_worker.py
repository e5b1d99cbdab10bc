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
from typing import Any

import torch
import vllm.model_executor.layers.utils as vllm_kernels
from torch import Tensor, nn
from vllm.distributed import get_tensor_model_parallel_rank

from echo2p2p.errors import EngineError
from echo2p2p.net.memory import map_state
from echo2p2p.wire import codec
from echo2p2p.wire.messages import LayoutTable, TensorSpec
from peer.engine.state_dtypes import STATE_DTYPES
from peer.engine.vllm_layers import Piece, check_kernels, pieces_of


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

    def echo_read_back(self, path: str, rank: int) -> None:
        """Write what this rank's kernels use into the flat state at ``path``, if it is its turn.

        Parts that an earlier rank has written too must be the same.

        Raises:
            EngineError: A kernel uses something else than its parameter, or ranks differ.
        """
        if get_tensor_model_parallel_rank() != rank:
            return
        model = self._echo_model()
        if _places(model) != self._echo_places:
            raise EngineError("vLLM has moved weights: what it has captured uses the old ones")
        check_kernels(model, self._echo_turn)
        self._echo_turn += 1
        with open(path, "r+b") as file:  # noqa: PTH123 - a descriptor of the engine's process
            mapped = mmap.mmap(file.fileno(), self._echo_table.total_bytes)
        flat = torch.frombuffer(mapped, dtype=torch.uint8)
        for spec in self._echo_table.tensors:
            whole = _view(flat, spec)
            for name in (spec.name, *spec.tied):
                if name != spec.name and self._echo_shares(name, spec.name):
                    continue
                for piece in self._echo_pieces.get(name, ()):
                    target = whole[piece.part] if piece.part else whole
                    if name == spec.name and piece.owner:
                        target.copy_(piece.live)
                    elif not _same_bits(target, piece.live.to("cpu", target.dtype)):
                        raise EngineError(f"{name} differs from {spec.name}, or between ranks")
            _put_back(flat, spec, whole)
        del flat, whole, target
        mapped.close()

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


def _extent(pieces: list[Piece]) -> tuple[int, ...]:
    return tuple(pieces[0].live.shape)


def _places(model: nn.Module) -> dict[str, int]:
    return {name: parameter.data_ptr() for name, parameter in model.named_parameters()}


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
