"""Tools and programs to start from. The product imports nothing from here."""
