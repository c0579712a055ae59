"""Sources of the machine's state, and their combination into one snapshot.

The sources are the threads of the C core, and watchers of GPUs, PCI bus, declaration files and pods.
"""
