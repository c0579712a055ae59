"""gRPC for the agent: the hardened grpclib, the codec and the generated messages."""
