"""What must hold, and what a campaign must have seen."""
