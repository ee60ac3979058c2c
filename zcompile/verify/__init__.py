"""Proofs about graphs: what must always hold, and what a pass has established."""
