"""On-policy rollout: groups, engines, the sampler that refills, and the cost ledger."""
