"""The built-in engine of the catalog: membership by SWIM, and owner logs that neighbours tell each other."""
