"""The data plane that HAProxy carries: what needs no decision passes through it alone, all else through the embedded
one.

HAProxy runs as a process of its own, which goes on serving while this one is away. Per app and public port it has a
*backend* with the machines that take requests, changed live. Whatever else there is goes to the *activator*: the
embedded plane, behind HAProxy, by a socket in the file system.
"""
