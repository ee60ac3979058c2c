"""Checkpoints on disk: parts of tensors, the files that hold them, and how ranks write one together."""
