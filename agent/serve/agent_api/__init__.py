"""The agent's own gRPC API on ``agent.sock``: service, messages and client."""
