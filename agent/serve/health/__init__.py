"""The kubelet's DRA health API, v1 and v1alpha1."""
