"""Trajectories and what may be trained on: validation, admission, ledger, batches. Sans-IO."""
