"""One version of the weights as bytes: layout, delta, anchor, chunks, manifest, chain. Sans-IO."""
