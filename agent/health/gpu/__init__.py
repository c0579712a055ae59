"""GPUs judged by what can be read of them: a file per theme, their catalogue, what the rules are shown."""
