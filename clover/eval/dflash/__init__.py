"""A baseline: a block drafter for an autoregressive parent, as DFlash has it (arXiv 2602.06036)."""
