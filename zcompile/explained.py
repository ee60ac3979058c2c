"""Methods of the user's module that compute with shards: an error that says how to call them instead of torch's."""

from __future__ import annotations

import functools
from typing import Any

from zcompile.errors import ShardingError

#: what torch says where a shard is computed with beside plain tensors, saved by safetensors, or turned into an array or list
_NOT_FOR_SHARDS = ("mixed torch.Tensor and DTensor", "invalid python storage", "not supported for tensor subclasses")


def explained(method: Any) -> Any:
    """A method of the user's module, with an error of ours where it computes with shards."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except RuntimeError as error:
            if not any(words in str(error) for words in _NOT_FOR_SHARDS):
                raise
            name = method.__name__
            raise ShardingError(
                f"method '{name}' works on parameters, which are shards outside of the compiled forward; call it as "
                f"'with model.unsharded() as original: original.{name}(...)' on every rank"
            ) from error

    return call
