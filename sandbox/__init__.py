"""Running untrusted Python on one machine, each call in its own kernel cage."""
