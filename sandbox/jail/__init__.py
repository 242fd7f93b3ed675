"""The trust boundary: all code that runs inside a jail or builds one."""
