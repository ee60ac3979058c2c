"""Records what a device is given to do, to give it all at once later: CUDA graphs behind a small interface."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from zcompile import compat

T = TypeVar("T")


class Recording(Protocol):
    """Work of a device on fixed addresses."""

    def replay(self) -> None:
        """Do it again, in the order of the current stream."""
        ...


class Recorder(Protocol):
    """Makes recordings that are replayed in the order in which they were made, and share their memory."""

    def record(self, body: Callable[[], T]) -> tuple[Recording, T]:
        """What ``body`` gives the device to do, and what it returns. The device has not done it yet.

        Raises:
            RuntimeError: the device does something that cannot be recorded, such as waiting for the host.
        """
        ...

    def borrow(self, tensor: Tensor) -> Tensor:
        """The same elements as a tensor that does not keep its memory: later recordings may write over it."""
        ...

    def hidden_bytes(self) -> int:
        """Memory of all recordings that the allocator counts as free, as things are now."""
        ...

    def close(self) -> None:
        """Give the recordings and their memory back; what is replayed later does nothing. From any thread."""
        ...


class CudaRecorder:
    """CUDA graphs with one memory pool.

    Tensors that a body leaves alive keep their place in the pool; what it frees, the next recording may use again, so that the
    pool is as large as the peak of the recorded work and not as its sum.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._graphs: list[_Graph] = []
        self._lock = threading.Lock()
        self._closed = False
        self._free_before = 0

    def record(self, body: Callable[[], T]) -> tuple[Recording, T]:
        """See ``Recorder.record``. Calls of other threads that a recording would forbid are theirs alone."""
        gc.collect()
        torch.cuda.synchronize(self._device)
        if not self._graphs:
            torch.cuda.empty_cache()  # what steps took so far is in no pool that recordings use
            self._free_before = self._free()
        graph = torch.cuda.CUDAGraph()
        collects = gc.isenabled()
        gc.disable()  # it could free what belongs to the device in the middle of a recording
        try:
            with compat.no_workspaces(), torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    result = body()
                finally:
                    graph.capture_end()
        finally:
            if collects:
                gc.enable()
        recording = _Graph(graph)
        with self._lock:
            self._graphs.append(recording)
            closed = self._closed
        if closed:  # by another thread, meanwhile
            self.close()
        return recording, result

    def borrow(self, tensor: Tensor) -> Tensor:
        """See ``Recorder.borrow``."""
        if tensor.numel() == 0:
            return tensor
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        flat = torch.as_tensor(_Bytes(tensor.data_ptr(), extent * tensor.element_size()), device=self._device)
        return flat.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())

    def hidden_bytes(self) -> int:
        """See ``Recorder.hidden_bytes``: the growth of what is reserved and not allocated."""
        return max(0, self._free() - self._free_before)

    def close(self) -> None:
        """See ``Recorder.close``. NCCL's end waits until no graph uses it."""
        with self._lock:
            self._closed, graphs, self._graphs = True, self._graphs, []
        for graph in graphs:
            graph.close()

    def _free(self) -> int:
        return torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)


class _Graph:
    """A CUDA graph that one thread may end while another replays it."""

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph: torch.cuda.CUDAGraph | None = graph
        self._lock = threading.Lock()

    def replay(self) -> None:
        with self._lock:
            if self._graph is not None:
                self._graph.replay()

    def close(self) -> None:
        with self._lock:
            graph, self._graph = self._graph, None
            if graph is not None:
                graph.reset()


class _Bytes:
    """Bytes at an address of the device, for ``torch.as_tensor``."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "data": (address, False),
            "shape": (num_bytes,),
            "typestr": "|u1",
            "strides": None,
            "version": 3,
        }
