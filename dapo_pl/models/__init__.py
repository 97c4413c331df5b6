"""Model directories: made, unpacked or checked, always in transformers' format."""
