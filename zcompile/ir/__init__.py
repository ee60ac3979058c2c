"""The graph that every part of zcompile reads: torch.fx nodes plus parameters, axes and a text form."""
