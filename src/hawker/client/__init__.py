"""How parts talk: fast connections between agents, and two clients for people and programs, blocking and awaiting."""
