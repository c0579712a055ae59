"""Rules for GPUs: one module per theme, the catalog of the rules, their inputs, and the verdicts on GPUs."""
