"""Rules for GPUs: one module per theme, their catalog, their views, and verdicts on GPUs."""
