"""The microVM driver: every machine is a virtual machine of its own, its image a disk, its program started by our init.

- `driver` is the driver, `lifecycle` what its machines go through, `guest` one machine, `records` what is kept of it.
- `kernel` makes what a guest boots from, `disk` and `building` make its disks.
- `hypervisors` starts and suspends hypervisors. `hypervisor` is what the driver asks of one, and how QEMU does it;
  `firecracker` is how Firecracker does it. `templates` keeps snapshots of booted guests.
- `qemu` is QEMU's command line and control socket, `firecracker_api` Firecracker's API and its jailer's command line.
  `kvm` says whether the processor helps, `tools` what this host lacks.
- `frames` and `agent` are the host's side of the conversation with the guest's init (`hawker/init/guest.c`),
  `start_message` is what the guest is told, `figures` what it tells.
"""
