"""Twelve agents in network namespaces across three regions, over real sockets: they agree again after every fault.

The steps are in `bench/regions.py`, which prints the same times. What agreeing means is in `tests/kit/regions.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.kit.namespaces import missing_for_namespaces
from tests.kit.regions import three_regions

from bench import regions

MISSING = missing_for_namespaces()
pytestmark = [pytest.mark.full, pytest.mark.root, pytest.mark.slow, pytest.mark.skipif(bool(MISSING), reason=MISSING)]


@pytest.mark.timeout(360)
async def test_all_agree_after_a_start_a_partition_a_lost_disk_and_the_death_of_half_of_them(
    tmp_path: Path, measured: regions.Times
) -> None:
    async with three_regions(tmp_path) as fleet:
        await regions.start(fleet, measured)
        await regions.place(fleet, measured)
        await regions.partition(fleet, measured)
        await regions.lose_disk(fleet, measured)
        await regions.kill_half(fleet, measured)
