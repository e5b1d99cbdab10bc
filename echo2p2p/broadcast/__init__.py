"""Who sends which chunk to whom: overlay, deal, push, pull. Sans-IO."""
