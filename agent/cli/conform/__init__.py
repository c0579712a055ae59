"""``drahealth conform``: tests a DRA driver against the kubelet's contract."""
