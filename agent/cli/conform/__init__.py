"""``drahealth conform``: tests whether a DRA driver behaves as the kubelet requires."""
