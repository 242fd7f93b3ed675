"""The application behind the recipes: command line, checks before the start, one run or evaluation, exit status."""
