"""The parts of one layer's cache: where tokens lie, how they are packed, and attention on them."""
