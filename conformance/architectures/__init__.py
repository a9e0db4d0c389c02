"""Every architecture of mlx-lm, tiny and random, under our caches."""
