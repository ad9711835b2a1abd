"""The data plane on HAProxy: it forwards requests that need no routing decision by itself, and hands all others to the
embedded data plane.

HAProxy runs as a process of its own, which goes on serving while this one is away. For each app and public port it has
a *backend* with the machines that take requests, changed while it runs. Everything else goes to the *activator*: the
embedded plane, behind HAProxy, at a socket in the file system.
"""
