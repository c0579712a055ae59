"""Classification of failed prepares, and the texts that the kubelet gets."""
