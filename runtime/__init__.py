"""What runs a compiled step: shards, collectives, executor, optimizer (import name ``zcompile.runtime``)."""
