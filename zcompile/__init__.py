"""zcompile: a compiler for ZeRO data-parallel training on PyTorch."""

from zcompile import errors
from zcompile.api import compile, plan
from zcompile.errors import ZCompileError
from zcompile.module import CompiledModule, unwrap
from zcompile.planner.plan import Plan
from zcompile.runtime import optimizer as optim
from zcompile.weights import load_safetensors

__version__ = "0.1.0"

__all__ = [
    "CompiledModule",
    "Plan",
    "ZCompileError",
    "__version__",
    "compile",
    "errors",
    "load_safetensors",
    "optim",
    "plan",
    "unwrap",
]
