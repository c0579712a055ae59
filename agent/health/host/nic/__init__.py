"""Health rules for RDMA network adapters (NICs) that drivers declare."""
