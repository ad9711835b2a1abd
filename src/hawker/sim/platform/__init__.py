"""What agents run on: an event loop on virtual time, processes, a network, disks, and the record of what happens."""
