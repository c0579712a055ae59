"""``drahealth new-driver``: a new DRA driver with its tests, image and manifests."""
