"""Rules for hugepage pools."""
