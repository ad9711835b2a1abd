"""The life of a machine: what may happen to it next, and what is done then. `docs/machine-states.md` is drawn from it.

Three questions are all there are, and each has a table:

- Somebody wishes something of a machine (`wishes`): what about the run that holds it, and what is begun?
- A run has ended, well or early, or the program ended by itself (`endings`): what is undone, and where does the machine
  rest?
- The worker comes back and compares its rows with what runs (`endings.found`): what is put right?

`hawker.worker` carries out what these say.
"""
