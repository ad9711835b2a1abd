"""How parts talk: one fast connection between agents, one plain client for people and programs."""
