"""Stories with an end of their own, told by one world each."""
