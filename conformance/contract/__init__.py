"""What the tests of the contract share: the caches they run on, and the models that use them."""
