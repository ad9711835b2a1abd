"""What things are called: frozen values, the public API's bodies, and the words of the market."""
