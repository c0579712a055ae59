"""DRA drivers with drahealth inside, one per kind of program: examples, and what the tests run."""
