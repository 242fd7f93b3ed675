from scheduler.traces.command_line import main

main()
