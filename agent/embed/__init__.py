"""drahealth inside a DRA driver: the monitor, its checks, and a plugin server for those without one."""
