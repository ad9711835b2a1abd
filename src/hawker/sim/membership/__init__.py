"""Membership alone, on a bare event heap: thousands of members, without asyncio."""
