"""The trust boundary: all that runs inside a cage or builds one."""
