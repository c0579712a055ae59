"""The kubelet's side of the plugin protocol, as ``drahealth conform`` runs it against a driver."""
