"""What a proxy knows from the catalog: apps from their first use on, all workers, and who claims which port."""
