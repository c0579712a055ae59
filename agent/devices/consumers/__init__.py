"""Which claims, pods and pod groups use a device."""
