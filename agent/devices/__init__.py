"""What the node has to give: devices and their names. Pure."""
