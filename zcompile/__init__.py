"""zcompile: a compiler for ZeRO data-parallel training on PyTorch."""

from zcompile import errors
from zcompile.api import compile
from zcompile.checkpoint import Loaded, load_checkpoint, save_checkpoint
from zcompile.errors import ZCompileError
from zcompile.export import export_safetensors
from zcompile.module import CompiledModule, unwrap
from zcompile.runtime import optimizer as optim
from zcompile.weights import load_safetensors

__version__ = "0.1.0"

__all__ = [
    "CompiledModule",
    "Loaded",
    "ZCompileError",
    "__version__",
    "compile",
    "errors",
    "export_safetensors",
    "load_checkpoint",
    "load_safetensors",
    "optim",
    "save_checkpoint",
    "unwrap",
]
