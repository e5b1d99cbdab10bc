"""Public fakes: a virtual network, disk, HTTP and children, and the checkers that watch a run."""
