"""Services for a DRA driver (health, prepares, taints), in the driver's process or over its socket."""
