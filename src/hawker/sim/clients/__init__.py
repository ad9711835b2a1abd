"""Who asks: clients of the market, owners and users of apps, an operator; and the oracle of what they were told."""
