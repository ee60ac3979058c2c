"""Meshes, and the collectives of one compiled model."""
