"""``drahealth conform`` against drivers: good ones pass, and of a bad one it says by code what is wrong."""
