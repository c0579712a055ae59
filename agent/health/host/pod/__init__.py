"""Rules for pods whose cgroups differ from their expected allocation."""
