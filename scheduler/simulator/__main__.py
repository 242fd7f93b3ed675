from scheduler.simulator.cli import main

main()
