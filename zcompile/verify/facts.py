"""The facts that passes establish and the verifier checks again after every later pass."""

from __future__ import annotations

from enum import Enum


class Fact(Enum):
    """Something that holds from the pass that establishes it until a pass that breaks it."""

    #: every parameter has a unit, and every compute node a region; regions are consecutive
    UNITS_PLANNED = "units-planned"
    #: every parameter placeholder is the padded local shard, or replicated
    PARAMS_SHARDED = "params-sharded"
    #: every use of a parameter lies between its wait and its release; no unscheduled ``zc.unshard`` is left
    PARAMS_GATHERED = "params-gathered"
    #: every parameter gradient that is returned was reduced exactly once, over the right axis
    GRADS_REDUCED = "grads-reduced"
    #: compute sits in regions; the top level holds collectives, waits, releases and region calls only
    OUTLINED = "outlined"
    #: at stage 3, no more gathered parameters are kept for backward than the policy says
    KEEP_BOUNDED = "keep-bounded"
    #: collectives are grouped to the bucket size, whole units at a time
    BUCKETED = "bucketed"
    #: collectives in flight stay within the lookahead and the memory limit of the policy
    PREFETCH_BOUNDED = "prefetch-bounded"
    #: copies between the device and the host stay within the lookahead of the pass
    OFFLOAD_BOUNDED = "offload-bounded"
    #: no random operator runs again in backward without its saved state, and none that makes gradients in forward
    RECOMPUTE_SAFE = "recompute-safe"
