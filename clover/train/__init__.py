"""Training: documents, packed rows, the loop."""
