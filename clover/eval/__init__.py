"""Measuring models: what is asked, who answers, what it took."""
