"""DAPO on Lightning: understand reinforcement learning on language models, not only run it."""

__version__ = "0.1.0"
