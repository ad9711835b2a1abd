"""The microVM driver: every machine a virtual machine of its own, its image a disk, its program started by our init.

`driver` is the driver, `machines` what its machines go through, `guest` one of them, `records` what is kept of it.
`kernel` makes what a guest boots from, `disk` and `building` its disks; `hypervisors` starts them and suspends them,
`vmms` is what is asked of one and how QEMU does it, `firecracked` how Firecracker does; `templates` keeps snapshots of
booted guests. `qemu` is QEMU's command line and control socket, `firecracker` the other's API and its jailer's command
line, `kvm` says whether the processor helps, `tools` what is missing here. `wire` and `agent` are the host's side of
the conversation with the guest's init (`hawker/init/guest.c`), `machine` what the guest is told, `figures` what it
tells.
"""
