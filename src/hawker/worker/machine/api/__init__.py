"""The calls that a worker answers about its machines."""
