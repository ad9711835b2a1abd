"""The microVM driver: every machine a virtual machine of its own, its image a disk, its program started by our init.

`driver` is the driver, `machines` what its machines go through, `guest` one of them, `records` what is kept of it.
`kernel` makes what a guest boots from, `disk` and `building` its disks; `hypervisors` starts QEMU and moves state in
and out, `templates` keeps snapshots of booted guests. `qemu` is QEMU's command line and control socket, `kvm` says
whether the processor helps, `tools` what is missing here. `wire` and `agent` are the host's side of the conversation
with the guest's init (`hawker/init/guest.c`), `machine` what the guest is told, `figures` what it tells. `firecracker`
is another hypervisor, which the driver does not use yet.
"""
