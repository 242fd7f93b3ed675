"""The Ray actors: thin shells that give the plain classes of the other rooms an address."""
