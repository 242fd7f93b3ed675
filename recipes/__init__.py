"""The commands. The application behind them is in actors/launch and actors/talk."""
