"""``drahealth fleet``: the sick devices of all nodes, from the metrics in a Prometheus server."""
