"""Server of the kubelet's plugin APIs for a DRA driver written in Python: registration, prepare, health."""
