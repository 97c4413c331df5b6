"""Each technique is one callback that changes its own seam of naive GRPO (see `dapo_pl.seams`) and nothing else."""
