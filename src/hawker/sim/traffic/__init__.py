"""Users' requests: the machines' programs that take them, and what users are promised."""
