"""Drivers run machines. `base` is the contract, every other module one driver."""
