"""A worker's images: what it has, where the rest comes from, and what the market and the API ask of it."""
