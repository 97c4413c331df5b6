"""Lightning callbacks: the techniques, one per file, and the monitors."""
