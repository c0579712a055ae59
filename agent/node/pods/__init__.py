"""Who uses the node's devices, asked of everybody on the node who knows, and what follows for the pods."""
