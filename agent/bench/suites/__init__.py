"""Benchmark suites: modules with a function ``run(run_size)`` that returns a SuiteOutcome."""
