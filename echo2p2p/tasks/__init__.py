"""The data plane: items, episodes, rewards. Pure; never imported by peers."""
