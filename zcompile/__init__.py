"""zcompile: a compiler for ZeRO data-parallel training on PyTorch."""

__version__ = "0.1.0"
