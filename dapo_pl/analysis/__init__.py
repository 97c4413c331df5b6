"""What notebooks and reports call: reading runs, figures, statistics."""
