"""``drahealth config``: the effective configuration with its origins, a check of files, and a JSON schema."""
