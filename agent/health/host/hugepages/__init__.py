"""Health rules for hugepage pools."""
