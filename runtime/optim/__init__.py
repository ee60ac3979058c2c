"""Optimizers over flat memory, clipping, and the loss scale."""
