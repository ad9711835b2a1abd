"""Every kind of fault: how often it comes, whom it hits, and what it does to a fleet."""

from __future__ import annotations

from hawker.sim.faults import crashes, disks, drivers, network
from hawker.sim.faults.faults import Kind

KINDS: dict[str, Kind] = {
    "kill": Kind(3, "any", (0.1, 4), (0, 0), crashes.kill),
    "kill at a write": Kind(2, "worker", (0.1, 3), (1, 30), crashes.kill_at_write),
    "kill at an effect": Kind(2, "worker", (0.1, 3), (1, 9), crashes.kill_at_effect),
    "kill before the reply": Kind(1.5, "broker", (0.1, 3), (0, 0), crashes.kill_before_reply),
    "cut at the answer": Kind(1.5, "broker", (5, 9), (0, 0), network.cut_at_answer),
    "kill before the confirm": Kind(1.5, "broker", (0.1, 3), (0, 0), crashes.kill_before_confirm),
    "power cut": Kind(1, "any", (0.5, 6), (0, 0), crashes.power),
    "long power cut": Kind(0.5, "worker", (10, 25), (0, 0), crashes.power),
    "power cut in a write": Kind(2, "worker", (0.5, 5), (1, 40), crashes.power_at_write),
    "storage reset": Kind(0.7, "worker", (0.2, 3), (0, 0), crashes.disk_power),
    "lost disk": Kind(0.4, "worker", (0.5, 4), (0, 0), crashes.lost_disk),
    "restore": Kind(0.4, "worker", (3, 15), (0, 1), crashes.restore),
    "shrink": Kind(0.4, "worker", (0.5, 3), (0.4, 0.9), crashes.shrink),
    "mass restart": Kind(0.3, "any", (0.5, 6), (0, 0), crashes.mass_restart),
    "pause": Kind(2, "any", (0.2, 12), (0, 0), crashes.pause),
    "full disk": Kind(1.5, "worker", (1, 8), (0, 60_000), disks.full),
    "i/o error": Kind(1.5, "worker", (0, 0), (1, 30), disks.io_error),
    "broken disk": Kind(0.5, "worker", (1, 5), (0, 0), disks.broken_disk),
    "slow disk": Kind(1, "worker", (2, 8), (0.005, 0.3), disks.slow_disk),
    "isolated": Kind(0.7, "any", (1, 10), (0, 0), network.isolate),
    "cut pair": Kind(1.5, "any", (1, 15), (0, 0), network.cut_pair, pair=True),
    "cut one way": Kind(1.5, "any", (1, 15), (0, 0), network.cut_one_way, pair=True),
    "deaf or mute": Kind(0.7, "any", (1, 8), (0, 1), network.deaf),
    "split region": Kind(0.4, "any", (2, 12), (0, 0), network.split),
    "flap": Kind(0.7, "any", (3, 10), (0, 0), network.flap),
    "swizzle": Kind(0.5, "any", (4, 15), (0, 0), network.swizzle),
    "loss": Kind(1.5, "any", (3, 20), (0.02, 0.4), network.quality("loss")),
    "duplicates": Kind(1, "any", (3, 20), (0.05, 0.5), network.quality("duplicates")),
    "reordering": Kind(1, "any", (3, 20), (0.05, 0.5), network.quality("reordered")),
    "slow link": Kind(1, "any", (2, 10), (0.05, 0.6), network.quality("slow_s")),
    "clock jump": Kind(1, "any", (0, 0), (-20, 20), drivers.jump),
    "clock drift": Kind(0.7, "any", (0, 0), (-0.05, 0.05), drivers.drift),
    "slow driver": Kind(1, "worker", (2, 10), (0.1, 2), drivers.slow_driver),
    "failing driver": Kind(1.5, "worker", (1, 6), (1, 12), drivers.failing_driver),
    "no images": Kind(0.7, "worker", (1, 10), (0, 3), drivers.no_images),
    "late exits": Kind(0.7, "worker", (3, 10), (0.05, 3), drivers.late_exits),
}
"""Every kind of fault, with how often it comes in a minute of the whole system."""

OF_USERS: dict[str, Kind] = {
    "hung programs": Kind(3, "worker", (2, 25), (0, 0), drivers.hung_programs),
    "lost catalog": Kind(2.5, "edge", (0.5, 6), (0, 1), crashes.lost_catalog),
}
"""The kinds of fault that come only where users ask for apps."""
