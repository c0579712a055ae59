"""The kubelet's plugin APIs for an embedded driver: registration, prepare, sockets, leader election."""
