"""``drahealth fleet``: the devices of all nodes that are not healthy, from a Prometheus server."""
