"""Prompt sources, worked examples, and the DataModule that rolls out."""
