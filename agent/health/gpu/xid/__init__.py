"""XIDs (GPU errors) and SXids (NVSwitch errors): tables, kernel log lines, and decisions on severity."""
