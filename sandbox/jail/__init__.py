"""The trust boundary: all that runs inside a jail or builds one."""
