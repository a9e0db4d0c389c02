"""The server's engine: batches that no request can stop, budgets, figures."""
