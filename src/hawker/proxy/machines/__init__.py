"""How a proxy reaches machines: by their doors, or by way of another proxy; and how it has them started and stopped."""
