"""The kubelet's own plugin watcher, DRA manager and event recorder, built from its sources.

The Go program in ``go/`` runs that code. The API server and the pod workers are those of the tests.
"""
