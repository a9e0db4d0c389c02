"""How each model of mlx_lm uses its caches, and which of ours it therefore gets."""
