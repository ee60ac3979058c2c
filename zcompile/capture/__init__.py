"""From a model and one call's arguments to a joint graph, and from that to a forward and a backward graph."""
