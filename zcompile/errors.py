"""Every exception of zcompile, and how they are worded.

A message is lower case, has no final period, names its subject first, gives the numbers that disagree, and ends with what to do.
User mistakes derive from ``ValueError`` or ``TypeError`` as well; errors of a running job begin ``[rank 3 of 8]``.
"""

from __future__ import annotations

import torch


class ZCompileError(Exception):
    """The base of every error that zcompile raises on purpose."""


class ConfigError(ZCompileError, ValueError):
    """An argument or a combination of arguments that has no meaning."""


class BudgetError(ConfigError):
    """No combination of options keeps a memory budget: says which comes nearest, and what would fit.

    Attributes:
        least_bytes: the smallest predicted peak that was found.
        changes: what would fit, each planned.
    """

    least_bytes: int
    changes: list[str]

    @classmethod
    def of(cls, text: str, least_bytes: int, changes: list[str]) -> BudgetError:
        """With all that it says."""
        error = cls(text)
        error.least_bytes, error.changes = least_bytes, changes
        return error


class CaptureError(ZCompileError, ValueError):
    """The model cannot be captured as one graph: says where, why and what to do."""


class SignatureError(CaptureError):
    """A call that cannot be served by any capture, such as one more signature than ``max_captures``."""


class TextError(ZCompileError, ValueError):
    """Graph text that does not parse: carries the line number."""


class PassError(ZCompileError, ValueError):
    """A pass was asked for something that it cannot do on this graph."""


class PipelineError(ZCompileError, ValueError):
    """A pipeline spec that is unknown, malformed or in an order that cannot work."""


class VerifyError(ZCompileError, ValueError):
    """A graph breaks an invariant: names the node, its source line and the nodes around it."""


class ShardingError(ZCompileError, ValueError):
    """A parameter that cannot be stored the way it was asked for."""


class PlanError(ZCompileError, ValueError):
    """A plan that cannot be made: a model, hardware or size that is unknown or has no meaning."""


class ProfileError(ZCompileError, RuntimeError):
    """A profile that is asked for what it has not measured yet, or that cannot be taken now."""


class OptimizerError(ZCompileError, ValueError):
    """An optimizer that would give wrong results on sharded parameters."""


class StateError(ZCompileError, ValueError):
    """A state dict that does not fit the model or the optimizer."""


class MeshError(ZCompileError, ValueError):
    """A device mesh or process group that zcompile cannot run on."""


class BackwardError(ZCompileError, RuntimeError):
    """A backward call that is not supported, such as double backward or a gradient for a detached output."""


class RegionError(ZCompileError, RuntimeError):
    """A compiled region gave something else than its graph says: a bug of a compiler below zcompile, or of the lowering."""


class UnfilledError(ZCompileError, RuntimeError):
    """A parameter or buffer of a ``meta`` model was used before it was given values."""


class ScalerError(ZCompileError, RuntimeError):
    """A gradient scaler was used in an order that has no meaning, such as ``unscale_`` twice in one step."""


class NonFiniteError(ZCompileError, RuntimeError):
    """A value is NaN or infinite: names the first one and where it comes from."""


class LossScaleError(NonFiniteError, OverflowError):
    """The loss scale is at its minimum and gradients still overflow: names the parameters."""


class OutOfMemoryError(ZCompileError, torch.OutOfMemoryError):
    """The device has no room left: says what takes it and what would save most.

    Attributes:
        anatomy: bytes by kind, of what was known at that moment.
        advice: (estimated bytes saved on this rank, change), the most effective first.
    """

    anatomy: dict[str, int]
    advice: list[tuple[int, str]]


class HostMemoryError(ZCompileError, RuntimeError):
    """The host has too little memory for what is to be offloaded: says what, how much, and how much there is."""


class CheckpointError(ZCompileError, RuntimeError):
    """A checkpoint that cannot be written or read: says on which rank, why, and what is on disk now."""


class RankError(ZCompileError, RuntimeError):
    """Another rank failed, is gone or left: names it and its reason."""


class RankMismatchError(RankError):
    """Ranks disagree about what to do next: names the first difference."""


class RankTimeoutError(RankError):
    """A wait for other ranks passed its timeout: names the operation and who is missing."""
