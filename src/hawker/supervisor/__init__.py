"""The supervisor: the parent of a worker's processes, which outlives the worker's daemon.

One small single-threaded process per worker, standard library only. `server` is what it does, `loop` and `wire` carry
it, `instance` is one program's life, `files` where it is written down, `cgroups` limits and kills, `proc` reads /proc,
`output` keeps what programs write. The daemon's side of the wire is `hawker.worker.drivers.supervisor`.
"""
