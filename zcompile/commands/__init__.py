"""The commands of ``python -m zcompile``, one a file: each adds its arguments to the parser and runs."""
