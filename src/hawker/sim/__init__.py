"""The simulator: the real agents on virtual time, a simulated network, disk and world, from one seed.

From the ground up, and imports only go down: `platform` is what agents run on (time, processes, network, disks);
`hosts` have an agent and programs; `clients` ask for things; a `plan` says what a run is made of, and a `fleet` is its
agents and their network. `faults` act on a fleet, `checks` look at it, `traffic` sends it users' requests. A `cluster`
is all of that together, `running` makes one and reports, and `campaign`, `replay`, `scenarios` and `cli` run many, one
again, or one with a story. `mutants` break our own code. Beside all this stand `replication`, `membership` and
`hostile`, which need less of a world.
"""
