"""What goes wrong, how often and with whom."""
