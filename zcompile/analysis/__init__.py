"""What graphs say about themselves: memory that values share, what they were computed from, when they are read last."""
