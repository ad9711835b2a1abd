"""Hawker places and runs containers, microVMs and processes the way a market does."""

__version__ = "0.1.0"
