"""The gRPC API through which a driver in another process uses the agent."""
