"""The worker's handlers, a method for each endpoint: the request checked, what does it called, the answer made."""
