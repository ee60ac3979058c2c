"""What is seen of a step while it runs."""
