"""Classification and retry of failed prepares (NodePrepareResources), and error texts for the kubelet."""
