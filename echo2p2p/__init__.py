"""The library that the peer, the coordinator and the scenarios share."""
