"""Readers and writers of protobuf messages."""
