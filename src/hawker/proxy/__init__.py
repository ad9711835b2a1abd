"""Users' requests on their way to machines.

An *edge proxy* takes a request, finds the app and a machine for it. The *worker proxy* of that machine's worker admits
it: it counts what is in flight, holds the hard limit, starts the machine when it sleeps, stops it when it idles. Both
are one program; between them lies the *backhaul*. What is decided is in `hawker.core`, what is known comes from the
catalog, and the truth about a machine is its worker's.
"""
