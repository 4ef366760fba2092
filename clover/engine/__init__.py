"""Many requests at once, and what a request may ask of its text."""
