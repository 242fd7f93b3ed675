from scheduler.twin.command_line import main

main()
