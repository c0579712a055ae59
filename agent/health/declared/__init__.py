"""What is wrong with the devices that drivers declare: the host's rules, asked of parts of it. Pure."""
