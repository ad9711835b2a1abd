"""One SQL view of the fleet on every node, without consensus: what each node publishes, spread to all."""
