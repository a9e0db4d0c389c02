"""What mlx-lm asks of a cache, as tests that run on its own caches and on ours."""
