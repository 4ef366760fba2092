"""Bytes on disk to named tensors and ready models, and back."""
