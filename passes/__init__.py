"""The graph passes (import name ``zcompile.passes``)."""
