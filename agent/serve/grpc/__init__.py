"""gRPC for the agent: the hardened grpclib, the asyncio thread, the codec and the generated messages."""
