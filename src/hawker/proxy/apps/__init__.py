"""Apps as a proxy serves them: machines that serve the same public ports, how each is reached, and who waits for
room."""
