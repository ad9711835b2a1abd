"""The simulator: the real agents on virtual time, a simulated network, disk and world, from one seed."""
