"""Inference engines behind one port; each engine runs in a child process."""
