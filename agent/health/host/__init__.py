"""What can be wrong with the host's own devices and its pods' cgroups: a pair of files per theme. Pure."""
