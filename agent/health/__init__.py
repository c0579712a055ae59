"""What is wrong, and since when: rules, their catalogue, and the state machine. Pure."""
