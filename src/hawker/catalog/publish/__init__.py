"""What a worker publishes: its rows as the fleet sees them, and the durable queue of their changes."""
