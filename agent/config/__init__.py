"""Configuration: flags, environment, configuration file, and their validation."""
