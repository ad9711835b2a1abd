"""A machine's place on the network of its host: its interface, addresses, routes, filters, ports and names."""
