"""The embedded data plane: HTTP/1.1, HTTP/2, TLS and bytes, asyncio Protocols without a task per request."""
