"""``python -m agent.bench``: benchmarks of the agent, compared with alternatives that do the same work.

Each suite measures one layer of the agent and, alternating with it, other implementations of the same work
(contenders). These are the lower bound (bare system calls without parsing) and tools that a user would take
instead. A suite checks that all contenders return equal results before it times them. The agent imports
nothing from this package.
"""
