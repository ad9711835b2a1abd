"""Mutations of our own code, each of which some invariant must notice within a few seeds."""
