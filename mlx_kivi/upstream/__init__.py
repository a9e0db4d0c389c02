"""What takes the place of functions of mlx_lm while it is hooked."""
