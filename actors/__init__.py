"""The Ray actors, thin shells around plain classes, and the calls between them."""
