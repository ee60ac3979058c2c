"""Profiling: what training steps took on this machine, beside what planning says, and what to do about it."""
