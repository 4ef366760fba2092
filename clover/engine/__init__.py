"""Many requests at once, equal to the plain loop by test. Speaks token ids only."""
