"""Peers for the tests of what goes over a socket: clients and servers that are not our own code."""
