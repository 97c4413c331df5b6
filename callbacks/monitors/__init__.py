"""Callbacks that watch: health, cost, samples, evaluation. None of them changes training."""
