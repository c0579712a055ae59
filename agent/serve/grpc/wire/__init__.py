"""Protobuf messages read and written field by field."""
