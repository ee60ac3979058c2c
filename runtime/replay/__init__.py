"""Steps recorded once and replayed as CUDA graphs."""
