"""What is slow or third-party to read: one file per source. The fast sources are in the native core."""
