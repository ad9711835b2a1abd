"""The embedded data plane: HTTP/1.1 and bytes, asyncio Protocols without a task per request."""
