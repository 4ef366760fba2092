"""The network: tensors in, tensors out. It knows no files, no text and no sampling."""
