"""``drahealth audit``: compares the cgroups of pods with their expected allocation."""
