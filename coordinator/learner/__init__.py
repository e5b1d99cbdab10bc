"""The learning plane: GRPO on torch, in a child process of the coordinator."""
