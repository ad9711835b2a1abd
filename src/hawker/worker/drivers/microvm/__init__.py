"""The microVM driver: every machine a virtual machine of its own, its image a disk, its program started by our init.

`driver` is the driver. `kernel` makes what a guest boots from, `disk` its disks, `templates` keeps snapshots of booted
guests, `qemu` is the command line and the control socket of the hypervisor, `kvm` says whether the processor helps.
`wire` and `agent` are the host's side of the conversation with the guest's init (`hawker/init/guest.c`), `machine` what
the guest is told, `figures` what it tells. `firecracker` is another hypervisor.
"""
