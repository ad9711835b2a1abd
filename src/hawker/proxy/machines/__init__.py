"""A machine that requests go to, behind a door: whether it runs and listens, here or behind another proxy."""
