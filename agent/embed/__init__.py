"""drahealth inside a DRA driver: the monitor, the driver's own checks, and a DRA plugin server."""
