"""What a model keeps in the host's memory."""
