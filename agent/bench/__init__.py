"""``python -m agent.bench``: benchmarks of the agent, compared with alternatives that do the same work.

Each suite runs one real workload of one layer. In the same run, interleaved, it measures the lower bound
(bare system calls, no parsing) and the tools that a user would take instead. A suite checks that all
contenders return equal results before it times them. The agent imports nothing from this package.
"""
