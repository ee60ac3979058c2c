"""The text of graphs: printing and parsing, which are each other's inverse."""

from __future__ import annotations

from zcompile.ir.parser import parse_graph, parse_graphs, parse_step
from zcompile.ir.printer import describe, print_graph, print_node, print_step

__all__ = ["describe", "parse_graph", "parse_graphs", "parse_step", "print_graph", "print_node", "print_step"]
