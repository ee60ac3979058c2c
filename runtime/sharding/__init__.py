"""Where parameters and gradients lie, and how values get there."""
