"""Entry points. Only this package knows Hydra."""
