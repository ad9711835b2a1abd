"""The worker: source of truth for its machines. Durable flows over a log, and the drivers that run things."""
