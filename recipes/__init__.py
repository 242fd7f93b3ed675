"""Pages that a user runs and reads. The application behind them is in actors/launch and actors/talk."""
