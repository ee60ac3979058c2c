"""Triton kernels over flat memory, each beside the plain-torch operation that it must equal. Importing one needs Triton."""
