"""What kind of failure it is when a claim cannot be prepared, and how that is said."""
