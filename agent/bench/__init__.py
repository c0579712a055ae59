"""``python -m agent.bench``: what the agent costs, beside what the same work costs otherwise.

Each suite runs one real workload of one layer, and beside it, interleaved in the same run, the floor (bare
system calls, no parsing) and what a user would take instead. Results are compared before speeds are.
Nothing here is imported by the agent.
"""
