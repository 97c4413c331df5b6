"""Each technique is one callback that changes exactly one seam of naive GRPO (see `dapo_pl.seams`)."""
