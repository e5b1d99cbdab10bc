"""Bytes to messages and back: schemas, codec, frames, handshake. Sans-IO."""
