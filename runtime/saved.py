"""What a forward leaves for its backward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from zcompile import compat
from zcompile.errors import BackwardError
from zcompile.runtime.buffers import Buffers
from zcompile.runtime.offload.host import HostMemory
from zcompile.runtime.replay.tape import Kind, Tape
from zcompile.runtime.sharding.shards import Contents


class SavedValues:
    """What one forward left for its backward. Buffers and host memory go back when nobody needs them any more.

    Args:
        buffers: where kept ones come from.
        host: where offloaded ones are.
        kind: of micro-batch, as its forward began.
        tape: of the forward, if it was replayed: all memory is the tape's then.
        contents: what ``shards.contents`` was at the forward; empty: outside of a declared window.
    """

    def __init__(self, buffers: Buffers, host: HostMemory, kind: Kind, tape: Tape | None, contents: Contents) -> None:
        self.kind = kind
        self.tape = tape
        self.contents = contents
        self.values: dict[str, Any] = {}
        self.kept: dict[str, Tensor] = {}
        self.offloaded: dict[str, Tensor] = {}
        if tape is not None:
            self.values, self.kept = tape.values, tape.kept
        self.versions: list[int] = []
        self._buffers = buffers
        self._host = host

    def of(self, kind: str) -> dict[str, Any]:
        """The values of one kind of port, by name."""
        return {"saved": self.values, "kept": self.kept, "offloaded": self.offloaded}[kind]

    def note_versions(self) -> None:
        """Values are as the forward left them now."""
        self.versions = [compat.version(value) for value in self._writable().values()]

    def _writable(self) -> Mapping[str, Tensor]:
        """The values that others may write to: of a tape's, buffers of the model alone."""
        return self.values if self.tape is None else self.tape.shared

    def num_bytes(self) -> int:
        """Bytes of the memory that the values lie in, shared memory once; kept buffers do not count."""
        storages = {s.data_ptr(): s.nbytes() for v in self.values.values() for s in [v.untyped_storage()]}
        return sum(storages.values())

    def check_versions(self) -> None:
        """Refuse a backward whose values were written to since the forward, as autograd does.

        Raises:
            BackwardError: an argument, buffer or output that backward reads was changed in place.
        """
        for (name, value), version in zip(self._writable().items(), self.versions, strict=True):
            if compat.version(value) != version:
                raise BackwardError(
                    f"a tensor that backward needs ('{name}', {list(value.shape)}) has been modified by an inplace operation since "
                    "the forward: it is an argument, an output or a buffer of the model; change a clone of it"
                )

    def take_kept(self, keep: bool) -> dict[str, Tensor]:
        """The kept buffers for a backward, which releases them: copies if another backward will come, or a tape has them."""
        if keep or self.tape is not None:
            return {name: self._buffers.take_copy(t) for name, t in self.kept.items()}
        kept, self.kept = self.kept, {}
        return kept

    def give_offloaded(self) -> None:
        """Give the host's memory back, once a backward has waited for its copies from it."""
        self._host.give(list(self.offloaded.values()))
        self.offloaded = {}

    def __del__(self) -> None:
        self.give_offloaded()
        if self.kept and self.tape is None:
            self._buffers.give(list(self.kept.values()))
