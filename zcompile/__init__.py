"""zcompile: a compiler for ZeRO data-parallel training on PyTorch."""

from zcompile import errors
from zcompile.api import compile
from zcompile.checkpoint import Loaded, load_checkpoint, save_checkpoint
from zcompile.engine import Engine
from zcompile.errors import ZCompileError
from zcompile.export import export_safetensors
from zcompile.launch import initialize
from zcompile.module import CompiledModule, unwrap
from zcompile.planner.plan import Plan
from zcompile.planning import plan
from zcompile.profiling.profile import Profile
from zcompile.runtime.optim import optimizer as optim
from zcompile.runtime.optim.scaler import GradScaler
from zcompile.weights import load_safetensors

__version__ = "0.1.0"

__all__ = [
    "CompiledModule",
    "Engine",
    "GradScaler",
    "Loaded",
    "Plan",
    "Profile",
    "ZCompileError",
    "__version__",
    "compile",
    "errors",
    "export_safetensors",
    "initialize",
    "load_checkpoint",
    "load_safetensors",
    "optim",
    "plan",
    "save_checkpoint",
    "unwrap",
]
