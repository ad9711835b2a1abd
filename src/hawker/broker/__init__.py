"""The broker: turns an order into a fill or a refusal. Holds nothing that lasts."""
