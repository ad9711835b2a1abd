"""What a proxy does by itself now and then, without a request that asks for it."""
