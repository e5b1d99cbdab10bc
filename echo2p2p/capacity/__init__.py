"""Can the fleet feed the learner, and at what price. Sans-IO."""
